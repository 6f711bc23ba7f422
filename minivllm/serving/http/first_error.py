"""Bodies as JSON has them, whose lists are validated up to their first error."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from minivllm.platform.given import whole

_LISTS = ("list", "tuple", "set", "frozenset")


def _settle(part: Any, in_list: bool = False) -> None:
    """Set `fail_fast` on all lists within a schema, and take no text and no boolean for a number,
    nor a number for a boolean. A whole number may be written 16.0, but for those of lists, of which
    there may be millions."""
    if isinstance(part, dict):
        kind = part.get("type")
        if kind in _LISTS:
            part["fail_fast"] = True
        elif kind in ("bool", "float") or (kind == "int" and in_list):
            part["strict"] = True
        elif kind == "int" and not part.get("strict"):
            strict: Any = {**part, "strict": True}
            part.clear()
            part.update(no_info_before_validator_function(whole, strict))
        for value in part.values():
            _settle(value, in_list or kind in _LISTS)
    elif isinstance(part, list | tuple):
        for value in part:
            _settle(value, in_list)


class FirstErrorModel(BaseModel):
    """A model that does not collect all errors of a list: those of some millions of wrong items, as
    a body has room for, would take a minute and gigabytes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The model's schema."""
        schema = handler(source)
        _settle(schema)
        return schema
