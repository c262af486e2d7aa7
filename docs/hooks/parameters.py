"""Our docstrings tell of parameters in lines of `name: what it is`; in the reference these become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ParameterLists(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        names = "|".join(re.escape(p.name) for p in func.parameters if p.name != "self")
        if func.docstring is not None and names:
            listed = re.sub(rf"^({names}): ", r"\n- `\1`: ", func.docstring.value, flags=re.MULTILINE)
            func.docstring.value = re.sub(r"(\n- .*\n(?:.+\n)*)\n(?=- )", r"\1", listed)
