"""An enumeration that is a table: every member is a name and a row of what is known about it."""

from enum import StrEnum
from typing import Any, Self


class Table(StrEnum):
    """Members are written `NAME = "name", Row(...)`; the row is `NAME.rule`, and `Table("name")` finds a member."""

    rule: Any

    def __new__(cls, name: str, rule: Any = None) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.rule = rule
        return member
