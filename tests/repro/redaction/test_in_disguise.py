"""Secrets in a sentence, encoded, over several lines or in letters that look alike; and what only looks like them."""

import time

import pytest

from toto_compat.repro.redaction.names import is_secret_name
from toto_compat.repro.redaction.parts import REDACTED
from toto_compat.repro.redaction.text import redact, redact_data, redact_variables

SECRET = "Hunt3rS3cretXYZ"  # noqa: S105 - it must not come out

SPOKEN = [
    *("password is {}", "The password was {} yesterday", "token is: {}", "my api key is {}.", "access token was `{}`"),
    *(
        "password is '{}'",
        'the secret is "{}"',
        "passphrase equals {}",
        "password has been changed to {}",
        "{{token is {}}}",
    ),
    *("Password for bob: {}", "password for user 'bob' is {}", "api key of account me@host = '{}'"),
    *("login failed for bob with password {}", "using the api key {}", "DB_PASSWORD is now {}, restart"),
]
ENCODED = [
    *(
        "password%3D{}",
        "?x=1%26password%3D{}",
        "state%3Dpassword%3D{}",
        "token%3D{}%26mode%3Ddefault",
        "password%253D{}",
    ),
    *("%22password%22%3A%22{}%22", "%22password%22%3A%20%22{}%22%7D", "Authorization%3A%20Bearer%20{}", "api_key%3a{}"),
    *("https%3A%2F%2Fu%3A{}%40host%2Fx", "next=https%253A%252F%252Fu%253A{}%2540host"),
    *(
        "&quot;password&quot;:&quot;{}&quot;",
        "&#39;token&#39;: &#39;{}&#39;",
        "password&#61;{}",
        "token&#x3D;{}&amp;a=1",
    ),
    *("password&colon; {}", "&lt;password&gt;{}&lt;/password&gt;", "<api-key>{}</api-key>"),
    '<add key="password" value="{}"/>',
]
OVER_LINES = [
    *(
        'password="abc\n{}"',
        "password='abc\n{}'\nmode=x",
        'PASSWORD="one\ntwo {}\nthree"',
        '"password": "abc\n{}", "a": 1',
    ),
    *('password = """\nabc {}\n"""', "password=\\\n{}", "password=abc\\\n   {} mode=x", 'password="abc\\\n{}"'),
]
LOOKING_ALIKE = [
    *(
        "p\u0430ssword={}",
        "t\u043eken={}",
        "T\u039fKEN={}",
        "\u03c1assword={}",
        "p\u0101ssword={}",
        "pass\u200bword={}",
    ),
    *(
        "\uff50\uff41\uff53\uff53word={}",
        "pass\u00adword: {}",
        "password\uff1d{}",
        "password\uff1a {}",
        "password\u2236{}",
    ),
    *(
        "\U0001d429\U0001d41a\U0001d42c\U0001d42c\U0001d430\U0001d428\U0001d42b\U0001d41d={}",
        "password -> {}",
        "password->{}",
        "password-> {}",
    ),
    "password \u2192 {}",
]


@pytest.mark.parametrize("form", [*SPOKEN, *ENCODED, *OVER_LINES, *LOOKING_ALIKE])
def test_a_secret_in_disguise_is_found(form: str) -> None:
    clean = redact(form.format(SECRET))
    assert REDACTED in clean
    assert SECRET not in clean
    assert redact(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        # sentences that tell none
        *("the password is wrong", "password is required", "If `token` is `None`,", "token is None", "token is valid."),
        *("api key is not set", "access_token is not None", "the next token is 50257", "token is 5", "pad_token is 0"),
        *(
            "password is read from /run/secrets/db",
            "secret is /run/secrets/db",
            "token is torch.float32",
            "secret is ***",
        ),
        *("token is L['self'].token", "token is self.get(token)", "password is ${DB_PASSWORD}", "token is v2.9.0"),
        *("with password authentication", "using token 0x7f3a12bc", "with token 2.9.0", "and password {password}"),
        *("First pass is fusion2", "pass -> post_grad", "The first pass \u2192 lowering2", "this pass was run2 times"),
        # what is encoded and no secret
        *(
            "mode%3Ddefault%26token_type_ids%3D3",
            "https%3A%2F%2Fhost%2Fx%40y",
            "100%25 of tokens%3A 5",
            "&quot;mode&quot;: 1",
        ),
        *(
            "a &lt;b&gt; c &amp;&amp; d",
            "<b>token</b>",
            "<module>",
            "<locals>",
            "torch%2F_dynamo%2Fconvert_frame.py%3A1358",
        ),
        '<add key="mode" value="default"/>',
        # guards, reasons, versions and paths
        *("6/7: kv_cache._current_idx[7] == 0", "L['self'].access_token == 5", "Eq(s43, 1) | Eq(s34*s85, s43)"),
        *("torch==2.9.0+cu128", "/usr/lib/python3.11/secrets.py:33: in token_hex", "mask -> [batch, heads]"),
        *("\u0441\u043b\u043e\u0432\u043e=5", "\u03b1=0.5 \u03bb\u2192\u221e", "m\u00e9thode: rapide", "h\u2192w"),
    ],
)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert redact(text) == text


def test_a_quote_that_is_never_closed_takes_no_other_lines_with_it() -> None:
    below = (
        "W1104 10:14:14.409000 torch/_dynamo/convert_frame.py:1358] [6/8]    function: 'positional_embedding'\n"
        "W1104 10:14:14.409000 torch/_dynamo/convert_frame.py:1358] [6/8]    last reason: 6/7: x'\n"
    )
    assert redact(f"token='{SECRET} cut off\n{below}").endswith(below)
    assert redact(f'password="{SECRET}\n2025-11-04 10:14:14 | INFO | mode is "default"\n').endswith('"default"\n')
    quoted = f'password="{SECRET}\nthe mode is "default" here\n'
    assert redact(quoted).endswith('the mode is "default" here\n')


def test_lines_of_another_kind_behind_a_long_value_stay() -> None:
    text = f'A=1\nPASSWORD="x\n{SECRET}"\nMODE=default\n'
    assert redact(text) == f'A=1\nPASSWORD="{REDACTED}"\nMODE=default\n'


def test_a_name_is_read_as_it_looks() -> None:
    assert is_secret_name("p\u0430ssword") and is_secret_name("\u0410PI_KEY") and is_secret_name("db_\uff50assword")
    assert not is_secret_name("\u0441\u043b\u043e\u0432\u043e") and not is_secret_name("\u03c4\u03b9\u03bc\u03ae")
    assert redact_variables({"HF_T\u039fKEN": SECRET}) == {"HF_T\u039fKEN": REDACTED}
    assert redact_data({"pass\u200bword": SECRET}) == {"pass\u200bword": REDACTED}


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "password is ",
            "api key is ",
            "with password ",
            "token%3D",
            "%25",
            "%2525",
            "token%20",
            "&#39;",
            "&lt;a&gt;",
            "<a>",
        ),
        *(
            'token="\n',
            "password=\\\n",
            "x%3A%2F%2F",
            "\u0430",
            "pass\u200b",
            'token="""',
            "is set to ",
            "a is ",
            "%22a",
        ),
    ],
)
def test_no_megabyte_takes_long(piece: str) -> None:
    start = time.process_time()
    redact(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 30
