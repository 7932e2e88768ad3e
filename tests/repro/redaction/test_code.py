"""Code in a bundle is still code: its secrets are taken out of string literals and comments, and nothing else."""

import ast

import pytest

from toto_compat.repro.redaction.code import redact_code
from toto_compat.repro.redaction.parts import REDACTED

SECRET = "LEAK99"  # noqa: S105 - it must not come out


@pytest.mark.parametrize(
    "form",
    [
        "API_KEY = {!r}",
        "self.token: str = {!r}",
        "connect(password={!r}, mode='default')",
        "headers = {{'api_key': {!r}}}",
        "def connect(host, token={!r}): pass",
        "def connect(*, token={!r}): pass",
        "os.environ['HF_TOKEN'] = {!r}",
        "token = os.environ.get('HF_TOKEN', {!r})",
        "token = given.get('x') or SecretStr({!r})",
        "password = ('a'\n    {!r})",
        "token = f'{{a}}' f{!r}",
        "token = {!r}.encode()",
        "pairs = [('password', {!r})]",
        "argv = ['--token', {!r}]",
        "if token == {!r}: pass",
        "if {!r} == token: pass",
        "user, password = 'me', {!r}",
        "[user, (host, password)] = ['me', ('h', {!r})]",
        "password += {!r}",
        "token = SecretStr(value={!r})",
        "token = (given := {!r})",
        "token = [*{!r}][1:]",
        "url = 'https://u:' {!r} '@h/'",
        "password = (lambda: {!r})()",
        "password = (lambda given={!r}: given)()",
        "password = [{!r} for _ in given][0]",
        "password = {{key: {!r} for key in given}}",
        "password = make()({!r})",
        "for password in ({!r},): pass",
        "for user, password in [('me', {!r})]: pass",
        "for user, password in zip(users, [{!r}]): pass",
        "tried = [connect(password) for password in ({!r},)]",
        "def get_password(): return {!r}",
        "def get_password():\n    'Ask.'\n    word = {!r}\n    return word",
        "async def api_key(): return f'{{a}}' {!r}",
        "def get_token(): return {!r}",
        "x = 1  # password={}",
        "'''ä password={}'''; x = 'ä'  # token: {}",
    ],
)
def test_a_secret_is_taken_out_of_the_literals_and_comments_of_code(form: str) -> None:
    clean = redact_code(f"import os\n\n{form.format(SECRET, SECRET)}\nafter = 'ä'\n")
    assert SECRET not in clean
    assert REDACTED in clean
    assert clean.endswith("\nafter = 'ä'\n")
    ast.parse(clean)


@pytest.mark.parametrize(
    "code",
    [
        'self.token = given.get("x")\n',
        'token = os.environ["HF_TOKEN"]\n',
        "access_token = self.tokens[7]\n",
        "red = '\\x1b[31m'\n",
        "password: str\n",
        "user, token = 'me', None\n",
        "if 'mean' in token or mode == 'token': pass\n",
        '__slots__ = ["token", "mask"]\r\n',
        "def f(token=None): return token == 5\n",
        "def get_password():\n    'Ask the environment.'\n    return os.environ['DB_PASSWORD']\n",
        "def append_token(self, keys): return keys.to('cuda')\n",
        "for token in tokens: assert token < len('eos')\n",
        "for name, token in (('mean', 1), ('last', 2)): pass\n",
        "is_token = kind == 'eos'\n",
        "access_token = given[kind == 'a']\n",
    ],
)
def test_code_without_a_secret_stays_as_it_is(code: str) -> None:
    assert redact_code(code) == code


def test_what_is_no_code_is_redacted_as_text() -> None:
    assert redact_code(f"this is = no code\npassword={SECRET}") == f"this is = no code\npassword={REDACTED}"
