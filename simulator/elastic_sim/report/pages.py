"""Pages from templates: the only module that needs jinja2. All values are escaped; the same values, the same bytes."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def page(template: str, values: dict[str, Any]) -> str:
    """Fill in a template of `simulator/elastic_sim/report/templates`."""
    environment = Environment(
        loader=PackageLoader("elastic_sim.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


def trusted(text: str) -> Markup:
    """Markup that was made, and escaped, by us."""
    return Markup(text)
