"""The name of a cell: `<environment>/<cache>/<mode>[+<settings>][@<workload>]`. Its identity, row and path."""

from dataclasses import dataclass
from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

STOCK_SETTINGS = "stock"  # PyTorch's own defaults; a name does not mention them


@dataclass(frozen=True)
class _Parts:
    environment: str
    cache: str
    mode: str
    settings: str
    workload: str


class CellName(str):
    """A cell's name as text, with its parts. `CellName.of` makes one, `CellName(text)` parses one."""

    __slots__ = ("_parts",)
    _parts: _Parts

    def __new__(cls, text: str) -> Self:
        environment, _, rest = text.partition("/")
        cache, _, how = rest.partition("/")
        compiled, at, workload = how.partition("@")
        mode, plus, settings = compiled.partition("+")
        if not (environment and cache and mode) or "/" in how or (plus and not settings) or (at and not workload):
            raise ValueError(f"{text!r} is no cell name: <environment>/<cache>/<mode>[+<settings>][@<workload>]")
        name = super().__new__(cls, text)
        name._parts = _Parts(environment, cache, mode, settings or STOCK_SETTINGS, workload)
        return name

    @classmethod
    def of(cls, environment: str, cache: str, mode: str, settings: str = STOCK_SETTINGS, workload: str = "") -> Self:
        """Put a name together; stock settings are left out of it, and a workload where there is only one."""
        suffix = "" if settings == STOCK_SETTINGS else f"+{settings}"
        return cls(f"{environment}/{cache}/{mode}{suffix}{f'@{workload}' if workload else ''}")

    @property
    def environment(self) -> str:
        return self._parts.environment

    @property
    def cache(self) -> str:
        return self._parts.cache

    @property
    def mode(self) -> str:
        return self._parts.mode

    @property
    def settings(self) -> str:
        return self._parts.settings

    @property
    def workload(self) -> str:
        """The workload, where its profile has several; else empty."""
        return self._parts.workload

    @property
    def mode_and_settings(self) -> str:
        return self.rpartition("/")[2].partition("@")[0]

    @property
    def for_all_workloads(self) -> Self:
        """The same name without its workload: what the rows of several workloads have in common."""
        return type(self)(self.partition("@")[0])

    def __getnewargs__(self) -> tuple[str]:
        return (str(self),)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls, core_schema.str_schema(), serialization=core_schema.plain_serializer_function_ser_schema(str)
        )
