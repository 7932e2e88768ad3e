"""Secrets that programs show: rows of tables, columns, the values that loguru writes below code, pydantic's errors."""

import time

import pytest

from toto_compat.repro.redaction.parts import REDACTED
from toto_compat.repro.redaction.text import redact

SECRET = "Hunt3rS3cretXYZ"  # noqa: S105 - it must not come out


@pytest.mark.parametrize(
    "form",
    [
        *("| api_key    | {} |", "| mode | x | api_secret | {} |", "\u2502 API key \u2502 {} \u2502"),
        *("\u2503 db_password \u2503 '{}' \u2503", "|password|{}|"),
        *("api_secret    {}", "mode       default\nAPI key    {}\nlayers     12", "  token\t{}", "password \t {}"),
        "1 validation error for Settings\napi_secret\n  Input should be a string [input_value='{}', input_type=str]",
        "exchange.password\n  Input is wrong [type=s, input_value={}, input_type=str]",
    ],
)
def test_a_secret_that_is_shown_is_taken_out(form: str) -> None:
    clean = redact(form.format(SECRET))
    assert clean == form.format(REDACTED)
    assert redact(clean) == clean


def test_below_a_line_of_code_the_values_of_secrets_are_taken_out_and_the_others_stay() -> None:
    shown = (
        "    client = Client(api_key, mode, self.api_secret)\n"
        "             \u2502      \u2502        \u2502     \u2502    \u2514 {}\n"
        "             \u2502      \u2502        \u2502     \u2514 <bot.Bot object at 0x7f00aabbccdd>\n"
        "             \u2502      \u2502        \u2514 'reduce-overhead'\n"
        "             \u2502      \u2514 {}\n"
        "             \u2514 <class 'x.Client'>\n"
    )
    assert redact(shown.format(f"'{SECRET}'", f"'{SECRET} x'")) == shown.format(*[f"'{REDACTED}'"] * 2)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "| tokens | 5 |",
            "| PASS | INCONCLUSIVE | FAIL |",
            "| cache | mode |\n|---|---|\n| list_index | default |",
            "token    5\nsecret   12.5%",
        ),
        *("2025-11-04 10:14:14 | INFO | skipping cudagraphs due to mutated inputs", "a | b || token | c"),
        *("x\n  \u2514 None", "mode\n  Input should be a string [input_value='x']", "\u2514 torch/_dynamo"),
        "    W1104 torch/_inductor  skipped",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        "| token ",
        "|a",
        "\u2514 x\n",
        "token  ",
        "token\n input_value=",
        "a b c  ",
        "\u2502 ",
        "x\n ",
        "API key ",
        "a\t",
    ],
)
def test_no_megabyte_takes_long(piece: str) -> None:
    start = time.process_time()
    redact(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 30
