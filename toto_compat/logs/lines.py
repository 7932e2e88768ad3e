"""One raw log line -> the message in it, and who said it. Knows logging prefixes, not what the messages mean."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from toto_compat.contract.log_line import LONGEST_LINE, LogLine, printable, shorten_path
from toto_compat.logs.times import time_in, time_of_epoch

LONGEST_JSON = 1_000_000
_LONGEST_PREFIX = 300  # the work on a line must not grow with the square of what stands before its message

# 'W1104 10:14:14.409000 101341 torch/_dynamo/convert_frame.py:1358] [6/8] [__recompiles] '; pid, place, tags may lack.
TORCH_PREFIX = re.compile(
    r"(?<![A-Za-z0-9])[VDIWEC]\d{4} \d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"(?: (?P<pid>\d+))?"
    r"(?: (?P<file>[^\s\]]+\.py):(?P<line>\d+)\])?"
    r"(?P<tags>(?: \[[^\]\s]{0,40}\])*) ?"
)
_COMPILE_ID = re.compile(r"\[(!?\d+(?:/\d+)+(?:_\d+)?)\]")
_RANK = re.compile(r"\[(?:default|rank)(\d+)\]:")
_SERVICE = re.compile(r"^(?:([\w.-]{0,60}[A-Za-z][\w.-]{0,60})\s+\|\s|\[pod/([^\]\s]+)\]\s)")
_OTHER_PID = re.compile(r"\b(?:pid|PID|process|ForkPoolWorker-)[=: ]?\s?(\d+)\b|[\[(](\d{2,7})[\])]")
# pytest's '[convert_frame.py:1358]' and plain logging's 'convert_frame.py:1358'
_OTHER_PLACE = re.compile(r"((?:[\w.-]+/)*[\w-]+\.py):(\d+)\b")

_CSV_FIELD = re.compile(r'(?:(?<=[,;\t])|^)"([^"]*(?:""[^"]*)*)(?:"\s*(?=[,;\t]|$)|(?P<open>$))')
_CSV_END = re.compile(r'([^"]*(?:""[^"]*)*)"\s*(?:[,;\t]|$)')

_LEVEL = r"(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL|NOTICE)"
_OTHER_PREFIX = re.compile(
    r"\s*(?:"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?"
    rf"|\[{_LEVEL}\s*\]|{_LEVEL}\b:?"
    r"|[|]|-(?=\s(?:[A-Z]|\S+ -))"
    r"|(?:torch|logging|root|py\.warnings)[\w.]*:(?:[\w./-]+\.py:\d+)?"
    r"|(?:stdout|stderr) [FP]"
    r"|E(?=   )"
    r")"
)
_RECORD = re.compile(
    r"\s*(?:[\[(]?(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d"
    rf"|[VDIWEC]\d{{4}} \d\d:|\[?{_LEVEL}\b)"
)
# the names that Python, its pools and loggers give to threads
_THREAD = re.compile(r"\b(MainThread|Thread-\d+|ThreadPoolExecutor-\d+_\d+|AnyIO worker thread|Dummy-\d+)\b")
_JSON_MESSAGE_KEYS = ("message", "msg", "log", "text", "event", "MESSAGE", "textPayload", "body")
_JSON_PROCESS_KEYS = ("pid", "process", "process_id", "_PID")
_JSON_TIME_KEYS = ("time", "timestamp", "@timestamp", "ts", "asctime", "datetime", "__REALTIME_TIMESTAMP")


def without_prefix(text: str) -> str:
    """Free text behind a timestamp, level, service or logger name; what is not known to be a prefix stays."""
    service = _SERVICE.match(text)
    rest = text[service.end() :] if service else text
    for _ in range(8):
        prefix = _OTHER_PREFIX.match(rest)
        if not prefix:
            break
        rest = rest[prefix.end() :]
    return rest


def begins_record(text: str) -> bool:
    """Tell whether a line has a prefix of its own: a time, a level or a service."""
    return bool(_RECORD.match(text) or _SERVICE.match(text) or TORCH_PREFIX.search(text))


def joined(outer: str, inner: str) -> str:
    """Join what two prefixes, one within the other, name as the process."""
    return f"{outer}:{inner}" if outer and inner else outer or inner


def process_in_prefix(prefix: str) -> str:
    """Find the process that a prefix without torch's own pid names, '' if none."""
    prefix = prefix[:_LONGEST_PREFIX]
    service = _SERVICE.match(prefix)
    named = (service.group(1) or service.group(2)) if service else ""
    rank = _RANK.search(prefix)
    numbers = _OTHER_PID.search(prefix)
    pid = next((group for group in numbers.groups() if group), "") if numbers else ""
    thread = _THREAD.search(prefix)
    parts = (named, f"rank{rank.group(1)}" if rank else "", pid, thread.group(1) if thread else "")
    return ":".join(part for part in parts if part)


def place_in_prefix(prefix: str) -> str:
    """Find the source line that a prefix other than torch's own names, '' if none."""
    places = _OTHER_PLACE.findall(prefix[-_LONGEST_PREFIX:])
    return f"{shorten_path(places[-1][0])}:{places[-1][1]}" if places else ""


def read_row(raw: str, is_message: Callable[[str], object], *, inside: bool) -> tuple[str, bool]:
    """Take a message out of the quoted field of a CSV export; tell as well whether the field goes on in the next line.

    What stands before the field stays, as the prefix of the message. `inside` says that the line before left one open.
    """
    if inside:
        end = _CSV_END.match(raw)
        return (end[1].replace('""', '"'), False) if end else (raw, True)
    brace = raw.find("{")
    for field in _CSV_FIELD.finditer(raw):
        if 0 <= brace < field.start():
            break  # the quotes are those of JSON
        message = field[1].replace('""', '"')
        if is_message(message):
            return raw[: field.start()] + message, field["open"] is not None
    return raw, False


def read_line(raw: str, number: int) -> Iterator[LogLine]:
    """Read the messages of one physical line: one, unless it is JSON or has escaped newlines or returns."""
    if "{" not in raw and "\\n" not in raw and "\r" not in raw:
        yield _read_message(printable(raw.rstrip("\n")[:LONGEST_LINE]), number, "")
        return
    process = time = ""
    texts = [raw]
    if "{" in raw and '":' in raw and len(raw) <= LONGEST_JSON:
        decoded = _json_record(raw[raw.index("{") :])
        if decoded is not None:
            texts, process, time = decoded
    if len(texts) == 1 and "\\n" in texts[0]:
        texts = texts[0].replace("\\n", "\n").replace('\\"', '"').split("\n")
    spoken_for: LogLine | None = None
    for text in texts:
        for part in re.split(r"[\r\n]+", text.rstrip("\r\n")):
            line = _read_message(printable(part[:LONGEST_LINE]), number, process)
            if line.torch_prefix:
                spoken_for = line
            elif spoken_for:
                # One physical line is one record: its first prefix holds for all of it.
                line = replace(spoken_for, text=line.text)
            yield replace(line, time=time) if time else line


def _read_message(text: str, number: int, process: str) -> LogLine:
    prefix = TORCH_PREFIX.search(text)
    if not prefix:
        return LogLine(number, text, process)
    pid, file, line, tags = prefix.groups("")
    if prefix.start():
        process = joined(process, process_in_prefix(text[: prefix.start()]))
    compile_id = _COMPILE_ID.search(tags)
    return LogLine(
        number,
        text[prefix.end() :],
        joined(process, pid),
        True,
        f"{shorten_path(file)}:{line}" if file else "",
        compile_id[1] if compile_id else "",
    )


def _json_record(text: str) -> tuple[list[str], str, str] | None:
    """Read the lines, process and time of a JSON record; None if the text is none."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    message = _json_message(value)
    if message is None:
        return None
    process = next((named for key in _JSON_PROCESS_KEYS if (named := _json_process(value, key))), "")
    time = next((said for key in _JSON_TIME_KEYS if (said := _json_time(value, key))), "")
    # A container engine wraps every line of the application in JSON, and that line may be JSON again.
    if message.lstrip().startswith("{"):
        inner = _json_record(message.lstrip())
        if inner is not None:
            return inner[0], joined(process, inner[1]), time or inner[2]
    return message.splitlines() or [""], process, time


def _json_message(value: Mapping[str, Any]) -> str | None:
    for key in _JSON_MESSAGE_KEYS:
        inner = value.get(key)
        if isinstance(inner, str):
            return inner
        if isinstance(inner, dict):
            return _json_message(inner)
        # journald writes what is not plain text as the numbers of its bytes
        if isinstance(inner, list) and inner and all(isinstance(byte, int) and 0 <= byte < 256 for byte in inner):
            return bytes(inner).decode("utf-8", "replace")
    strings = [inner for inner in value.values() if isinstance(inner, str)]
    return max(strings, key=len) if strings else None


def _of_record(value: Mapping[str, Any], key: str) -> Any:
    """Return a field of the record, or of what loguru puts into one of its own."""
    record = value.get("record")
    return value.get(key, record.get(key) if isinstance(record, dict) else None)


def _json_process(value: Mapping[str, Any], key: str) -> str:
    named = _of_record(value, key)
    if isinstance(named, dict):
        named = named.get("id")
    return printable(str(named))[:40] if isinstance(named, int | str) else ""


def _json_time(value: Mapping[str, Any], key: str) -> str:
    said = _of_record(value, key)
    if isinstance(said, dict):
        said = said.get("repr")
    if isinstance(said, str):
        return time_in(said[:64]) or (time_of_epoch(float(said)) if said[:20].isdecimal() and len(said) <= 20 else "")
    return time_of_epoch(said) if isinstance(said, int | float) else ""
