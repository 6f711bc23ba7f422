"""Bodies whose lists are validated up to their first error."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema

_LISTS = ("list", "tuple", "set", "frozenset")


def _fail_fast(part: Any) -> None:
    """Set `fail_fast` on all lists within a schema."""
    if isinstance(part, dict):
        if part.get("type") in _LISTS:
            part["fail_fast"] = True
        for value in part.values():
            _fail_fast(value)
    elif isinstance(part, list | tuple):
        for value in part:
            _fail_fast(value)


class FirstErrorModel(BaseModel):
    """A model that does not collect all errors of a list: those of some millions of wrong items, as
    a body has room for, would take a minute and gigabytes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The model's schema."""
        schema = handler(source)
        _fail_fast(schema)
        return schema
