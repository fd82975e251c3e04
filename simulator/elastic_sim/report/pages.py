"""Pages from templates; the only module that needs jinja2. All values are escaped."""

from __future__ import annotations

from typing import Any

from elastic.domain.errors import needs_extra
from elastic_sim.report import charts
from elastic_sim.report.assumptions import PROGRAM

with needs_extra("simulator", "An HTML page"):
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup


def page(template: str, values: dict[str, Any]) -> str:
    """Return a page: a filled-in template of `simulator/elastic_sim/report/templates`."""
    environment = Environment(
        loader=PackageLoader("elastic_sim.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    common = {"plotly": Markup(charts.library()), "version": PROGRAM}
    return environment.get_template(template).render({**values, **common})


def chart(figure: Any, name: str, label: str) -> Markup:
    """Return the markup of a figure; `name` is unique on its page, `label` describes it."""
    drawn = Markup(charts.html(figure, name))
    return Markup('<div role="img" aria-label="{}">{}</div>').format(label, drawn)
