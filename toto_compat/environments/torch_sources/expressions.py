"""Values of the expressions in torch's config modules, computed without torch: Linux, no variable set, not fbcode."""

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda one, other: one == other,
    ast.NotEq: lambda one, other: one != other,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
    ast.Is: lambda one, other: one is other,
    ast.IsNot: lambda one, other: one is not other,
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda one, other: one + other,
    ast.Sub: lambda one, other: one - other,
    ast.Mult: lambda one, other: one * other,
    ast.Div: lambda one, other: one / other,
    ast.FloorDiv: lambda one, other: one // other,
}
# A source that says 2 << 400 must not cost anything; torch's largest are powers like 2**30.
_LARGEST = 10**12
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool, "str": str}
_EMPTY: Mapping[str, Callable[[], Any]] = {"set": list, "list": list, "tuple": list, "dict": dict}
# get_tristate_env is torch's own reader, of a variable that is 1, 0 or not set
_ENVIRONMENT = frozenset({"os.environ.get", "os.getenv", "environ.get", "getenv", "get_tristate_env"})
# sys.platform, and the functions of torch that ask where it runs
_KNOWN: Mapping[str, Any] = {"sys.platform": "linux", "torch.version.hip": None}
_ANSWERS: Mapping[str, Any] = {"is_fbcode": False, "config.is_fbcode": False, "is_windows": False}


class Unknown(Exception):  # noqa: N818 - an answer, not an error
    """The value depends on torch or on the machine."""


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Compute an expression to plain data, or raise Unknown. `names` are those assigned before it."""
    value = _value(node, names)
    if not _is_plain(value):
        raise Unknown
    return value


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_plain(one) for one in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:  # noqa: PLR0911 - one return per kind of node
    try:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.List() | ast.Tuple():
                return [value_of(one, names) for one in node.elts]
            case ast.Set():
                return sorted((value_of(one, names) for one in node.elts), key=repr)
            case ast.Dict():
                return {_value(key, names): value_of(one, names) for key, one in _items(node)}
            case ast.Attribute():
                return _KNOWN[ast.unparse(node)]
            case ast.Call():
                return _called(node, names)
            case _:
                return _operation(node, names)
    except (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError) as error:
        raise Unknown from error


def _items(node: ast.Dict) -> list[tuple[ast.expr, ast.expr]]:
    if any(key is None for key in node.keys):
        raise Unknown
    return [(key, one) for key, one in zip(node.keys, node.values, strict=True) if key is not None]


def _operation(node: ast.expr, names: Mapping[str, Any]) -> Any:  # noqa: PLR0911 - one return per operator
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, names)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BoolOp(op=operator, values=values):
            result = None
            for one in values:
                result = _value(one, names)
                if bool(result) is isinstance(operator, ast.Or):
                    return result
            return result
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, names) else orelse, names)
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return _COMPARISONS[type(operator)](_value(left, names), _value(right, names))
        case ast.BinOp(left=left, op=operator, right=right):
            return _arithmetic(operator, _value(left, names), _value(right, names))
        case ast.JoinedStr() if all(isinstance(one, ast.Constant) for one in node.values):
            return "".join(str(one.value) for one in node.values if isinstance(one, ast.Constant))
        case _:
            raise Unknown


def _arithmetic(operator: ast.operator, one: Any, other: Any) -> Any:
    if isinstance(operator, ast.Pow | ast.LShift):
        if not (isinstance(one, int) and isinstance(other, int) and 0 <= other <= 40 and abs(one) <= 1024):
            raise Unknown
        value = one**other if isinstance(operator, ast.Pow) else one << other
    elif isinstance(one, int | float) == isinstance(other, int | float):  # a list times a number may fill the memory
        value = _ARITHMETIC[type(operator)](one, other)
    else:
        raise Unknown
    if isinstance(value, int | float) and abs(value) > _LARGEST:
        raise Unknown
    return value


def _called(node: ast.Call, names: Mapping[str, Any]) -> Any:
    function = ast.unparse(node.func)
    if function in _ENVIRONMENT:  # no variable is set
        given = [*node.args[1:], *(one.value for one in node.keywords if one.arg == "default")]
        return _value(given[0], names) if given else None
    if function in _ANSWERS and not node.args:
        return _ANSWERS[function]
    if function in _EMPTY and not node.args and not node.keywords:
        return _EMPTY[function]()
    if function in _CONVERSIONS and len(node.args) == 1 and not node.keywords:
        return _CONVERSIONS[function](_value(node.args[0], names))
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("lower", "upper", "strip", "split"):
        text = _value(node.func.value, names)
        if isinstance(text, str):
            return getattr(text, node.func.attr)(*(_value(one, names) for one in node.args))
    raise Unknown
