"""Secrets never reach a file: whatever they look like, and wherever they stand."""

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toto_compat.logs.parse import parse_lines
from toto_compat.repro.contents import redact_data
from toto_compat.repro.redaction import REDACTED, is_random, redact, redact_variables

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
# What a password may be made of; no quote, since a shell would end it there.
PRINTED = "".join(sorted(set(string.printable) - set(string.whitespace) - set("\"'`\\")))
secrets = st.text(PRINTED, min_size=6, max_size=60).filter(lambda text: not REDACTED.startswith(text[:1]))
tokens = st.text(string.ascii_letters + string.digits, min_size=36, max_size=40)

NAMED = [
    "HF_TOKEN={}",
    "export AWS_SECRET_ACCESS_KEY={}",
    "DB_PASSWORD={} next=1",
    "MY_KEY={}",
    "SENTRY_DSN={}",
    "password: {}",
    "api_key = {}",
    "--token {}",
    "--api-key={} --verbose",
    '{{"client_secret": "{}", "mode": "default"}}',
    "{{'X-Api-Key': '{}'}}",
    "Authorization: Bearer {}",
    "authorization: {}",
    'curl -H "Authorization: token {}" x',
    "Cookie: session={}",
    "2025-11-04 10:14:14 | INFO | connecting with passwd={}",
]
SHAPED = [
    "hf_{}",
    "ghp_{}",
    "github_pat_{}",
    "sk-{}",
    "glpat-{}",
    "npm_{}",
    "downloading with hf_{} now",
    "Bearer {}",
]


@pytest.mark.parametrize("form", NAMED)
@settings(deadline=None, max_examples=40)
@given(secret=secrets)
def test_what_a_name_says_is_secret_is_taken_out(form: str, secret: str) -> None:
    clean = redact(form.format(secret))
    assert REDACTED in clean
    assert secret not in clean
    assert redact(clean) == clean


@pytest.mark.parametrize("form", SHAPED)
@settings(deadline=None, max_examples=40)
@given(token=tokens)
def test_a_token_is_known_by_its_shape_wherever_it_stands(form: str, token: str) -> None:
    clean = redact(f"W1104 10:14:14 loading {form.format(token)} ")
    assert token not in clean
    assert clean.startswith("W1104 10:14:14 loading")


@settings(deadline=None, max_examples=40)
@given(
    user=st.text(string.ascii_letters, min_size=1, max_size=10),
    secret=st.text(PRINTED.translate(str.maketrans("", "", "/?#")), min_size=6, max_size=40),
    scheme=st.sampled_from(["https", "git+https", "postgres", "redis", "s3"]),
)
def test_a_url_loses_its_credentials_and_keeps_its_host(user: str, secret: str, scheme: str) -> None:
    clean = redact(f"toto-ts @ {scheme}://{user}:{secret}@index.example/simple/x.git@0123abc")
    assert secret not in clean
    assert f"{scheme}://{REDACTED}@index.example/simple/x.git@0123abc" in clean


@settings(deadline=None, max_examples=40)
@given(key=st.sampled_from(["token", "X-Amz-Signature", "sig", "access_key"]), secret=tokens)
def test_a_parameter_of_a_url_is_taken_out_and_the_next_one_stays(key: str, secret: str) -> None:
    clean = redact(f"GET https://host.example/x?{key}={secret}&mode=default HTTP/1.1")
    assert secret not in clean
    assert "&mode=default HTTP/1.1" in clean


def test_a_private_key_goes_with_all_of_its_lines() -> None:
    # in two parts, so that nobody takes this test for a key that was lost
    head, tail = "-----BEGIN RSA PRIVATE" + " KEY-----", "-----END RSA PRIVATE" + " KEY-----"
    assert redact(f"a\n{head}\nMIIEow\nIBAAK\n{tail}\nb") == f"a\n{REDACTED}\nb"
    assert "MIIEow" not in redact(f"{head}\nMIIEow")  # cut off


@settings(deadline=None, max_examples=40)
@given(secret=st.binary(min_size=24, max_size=32).map(lambda raw: raw.hex()).filter(is_random))
def test_a_random_value_of_a_variable_that_hints_at_a_key_is_taken_out(secret: str) -> None:
    assert secret not in redact(f"ENCRYPTION_KEYRING={secret}")
    assert redact_variables({"MYAUTHVALUE": secret, "MODE": "default"}) == {"MODE": "default", "MYAUTHVALUE": REDACTED}


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "STRIPE_KEY"]), secret=secrets)
def test_variables_are_judged_by_their_names(name: str, secret: str) -> None:
    assert redact_variables({name: secret}) == {name: REDACTED}


@settings(deadline=None, max_examples=40)
@given(secret=secrets)
def test_data_is_cleaned_by_its_keys_and_its_texts(secret: str) -> None:
    data = {"outer": [{"api_token": secret, "kept": 1}], "line": f"PASSWORD={secret}"}
    assert secret not in str(redact_data(data)["outer"]) + redact_data(data)["line"]
    assert redact_data(data)["outer"][0]["kept"] == 1


@pytest.mark.parametrize("log", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_what_the_compiler_says_passes_unchanged(log: Path) -> None:
    text = log.read_text(encoding="utf-8")
    assert redact(text) == text
    assert list(parse_lines(redact(text).splitlines(), "x")) == list(parse_lines(text.splitlines(), "x"))


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=512",
        "TOKENIZERS_PARALLELISM=false",
        "kv_cache._current_idx[7] == 0",
        "tokens: 5",
        "torch==2.9.0+cu128",
        "cache_key: short",
        "https://docs.pytorch.org/docs/main/x.html",
        "toto-ts @ git+https://github.example/x/toto@0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=300))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("piece", ["a.", "a-", "key", '"', "x://", "token=", "'a", 'password="a', "&a=", "-----BEGIN "])
def test_no_line_takes_long(piece: str) -> None:
    """Catastrophic backtracking would not end within the time of a whole test run."""
    assert isinstance(redact(piece * 40_000), str)


def test_words_and_paths_do_not_look_random() -> None:
    assert not is_random("/home/service/very/long/path/to/a/file")
    assert not is_random("reduce-overhead-and-more-words")
    assert is_random("x9Kd72mQpL04vTzR8bNw1cYh")
