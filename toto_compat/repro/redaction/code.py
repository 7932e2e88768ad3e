"""Takes secrets out of Python code and leaves it code: string literals and comments change, nothing else does."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from itertools import pairwise

from toto_compat.repro.redaction.names import is_secret_name
from toto_compat.repro.redaction.parts import REDACTED
from toto_compat.repro.redaction.text import redact

_Place = tuple[int, int, int, int]  # line and byte, of beginning and end
_TOKEN = re.compile(r"tokens?", re.I)
# The first argument of these is a name and not what has it.
_LOOKS_UP = re.compile(r"get|getattr|getenv|hasattr|pop|setdefault|require")


def redact_code(code: str) -> str:
    """Return the code without secrets, as code that compiles; what is no code is redacted as any text."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", code.replace("\r\n", "\n").replace("\r", "\n"))
    try:
        changes = [*_literals(ast.parse("".join(lines))), *_comments(lines)]
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return redact(code)
    if not changes:
        return code
    raw = [line.encode() for line in lines]
    for (first, start, last, end), text in sorted(changes, reverse=True):
        raw[first - 1 : last] = [raw[first - 1][:start] + text.encode() + raw[last - 1][end:]]
    clean = b"".join(raw).decode()
    ast.parse(clean)  # what is handed on at least compiles
    return clean


def _literals(tree: ast.Module) -> Iterator[tuple[_Place, str]]:
    named = [value for name, value in (*_named(tree), *_looped(tree)) if is_secret_name(name) and value]
    secret = {id(part) for value in [*named, *_in_functions(tree)] for part in _literal_parts(value)}
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part != node
    }
    for node in ast.walk(tree):
        if id(node) in inside or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        clean = _clean_literal(node, secret=id(node) in secret)
        if clean and node.end_lineno is not None and node.end_col_offset is not None:
            yield (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset), clean


def _clean_literal(node: ast.Constant | ast.JoinedStr, *, secret: bool) -> str:
    """Return the literal to write instead; empty where it may stay."""
    if isinstance(node, ast.JoinedStr):
        texts = [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
        return repr(REDACTED) if any(text and (secret or _cleaned(text)) for text in texts) else ""
    if isinstance(node.value, str):
        clean = REDACTED if secret and node.value else _cleaned(node.value)
        return repr(clean) if clean else ""
    if isinstance(node.value, bytes):
        clean = REDACTED if secret and node.value else _cleaned(node.value.decode("latin-1"))
        return repr(clean.encode("latin-1")) if clean else ""
    return ""


def _cleaned(text: str) -> str:
    """Take the secrets out of a text; empty where it has none: a colour alone is no reason to change code."""
    clean = redact(text)
    return clean if clean.count(REDACTED) > text.count(REDACTED) else ""


def _comments(lines: list[str]) -> Iterator[tuple[_Place, str]]:
    for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
        if token.type == tokenize.COMMENT and (clean := _cleaned(token.string)):
            row = token.start[0]
            start, end = (len(token.line[:column].encode()) for column in (token.start[1], token.end[1]))
            yield (row, start, row, end), clean


# --- names and what they are given ------------------------------------------------------------------------------------


def _named(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield names of the code with an expression that each is given: by assignment, argument, key or look-up."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _assigned(target, value)
            case ast.AugAssign(target=target, value=value):
                yield _name_of(target), value
            case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                yield _name_of(target), value
            case ast.keyword(arg=str(name), value=value):
                yield name, value
            case ast.Dict(keys=keys, values=values):
                yield from ((_name_of(key), value) for key, value in zip(keys, values, strict=True))
            case ast.arguments(args=args, posonlyargs=first, kwonlyargs=named, defaults=defaults, kw_defaults=others):
                plain = [one.arg for one in (*first, *args)]
                yield from zip(plain[len(plain) - len(defaults) :], defaults, strict=True)
                yield from zip((one.arg for one in named), others, strict=True)
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[value]):
                yield _name_of(left), value
                yield _name_of(value), left
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[value]):
                yield _name_of(left), value
            case ast.Call(args=parts) | ast.Tuple(elts=[_, _] as parts):
                yield from _pairs(parts)
            case ast.List(elts=parts):
                yield from ((name, value) for name, value in _pairs(parts) if name.startswith("--"))


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield what each name is given; of `user, password = "me", "hunter2"` its own part."""
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for name, part in zip(target.elts, value.elts, strict=False):
            yield from _assigned(name, part)
    else:
        yield _name_of(target), value


def _looped(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield what each name of a loop is given; where that cannot be told apart, all that is looped over."""
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For | ast.AsyncFor | ast.comprehension):
            continue
        if isinstance(loop.iter, ast.List | ast.Tuple | ast.Set):
            for one in loop.iter.elts:
                yield from _assigned(loop.target, one)
        else:
            parts = (part for part in ast.walk(loop.target) if isinstance(part, ast.Name | ast.Attribute))
            yield from ((_name_of(part), loop.iter) for part in parts)


def _in_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what stands in functions that are named like a secret, but for their docstrings.

    Of those named like tokens only what they return as it stands: more of them count tokens than guard a door.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not is_secret_name(node.name):
            continue
        if is_secret_name(_TOKEN.sub("", node.name)):
            yield from node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        else:
            returned = (part.value for part in ast.walk(node) if isinstance(part, ast.Return | ast.Yield))
            yield from (value for value in returned if isinstance(value, ast.Constant | ast.JoinedStr))


def _pairs(parts: Iterable[ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    return ((_name_of(one), other) for one, other in pairwise(parts) if isinstance(one, ast.Constant))


def _name_of(node: ast.expr | None) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name
        case ast.Constant(value=bytes(raw)):
            return raw.decode("latin-1")
        case ast.Subscript(slice=part):
            return _name_of(part)
    return ""


def _literal_parts(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the literals that make up a value; not the names by which one is looked up, nor what it is held against."""
    match node:
        case ast.Constant() | ast.JoinedStr():
            yield node
            return
        case ast.Compare():
            return
        case ast.Dict(values=parts):
            inner: Iterable[ast.AST] = parts
        case ast.IfExp(body=left, orelse=right):
            inner = (left, right)
        case ast.Call(func=called, args=args, keywords=named):
            looks_up = _LOOKS_UP.fullmatch(_name_of(called))
            inner = (called, *args[1 if looks_up else 0 :], *(one.value for one in named))
        case ast.Subscript(value=part):
            inner = (part,)
        case _:
            inner = ast.iter_child_nodes(node)
    for one in inner:
        yield from _literal_parts(one)
