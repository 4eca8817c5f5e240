# pyright: reportMissingImports=false
"""A griffe extension for the site: options of chz classes, with their defaults and help texts."""

import importlib
from typing import Any

import griffe
from site_reference import API_PAGES


class ChzFields(griffe.Extension):
    """Shows each `chz.field(default=..., doc=...)` as an attribute with a value and a docstring."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Replace the values and docstrings of the fields that the class itself declares."""
        is_shown = any(cls.module.path in page.names for page in API_PAGES.values())
        if not is_shown or "chz.chz" not in {str(each.value) for each in cls.decorators}:
            return
        import chz

        found: Any = importlib.import_module(cls.module.path)
        for name in cls.path.removeprefix(f"{cls.module.path}.").split("."):
            found = getattr(found, name)
        for name, field in chz.chz_fields(found).items():
            attribute = cls.members.get(name)
            if not isinstance(attribute, griffe.Attribute):
                continue
            attribute.value = _default_text(field)
            if field._doc:
                attribute.docstring = griffe.Docstring(field._doc, parent=attribute)


def _default_text(field: Any) -> str | None:
    """Return the default of a field as text; None if the field must be given."""
    if repr(field._default_factory) != "MISSING":
        return f"{field._default_factory.__name__}()"
    return None if repr(field._default) == "MISSING" else repr(field._default)
