"""Pieces that the report is put together from. Names and titles are escaped here; a `body` is HTML already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from echelon.observer.report.charts import Curve
from echelon.plan import format_units

#: CSS variables of the parts of a whole.
_COLOUR_VARIABLES = ("a", "b", "c", "d", "e", "f", "g")


def tile(name: str, value: str, detail: str) -> str:
    """One figure of the summary."""
    detail_html = f'<div class="more">{escape(detail)}</div>' if detail else ""
    # Units step back behind the figure: `7,830 samples/s`, `3 min 20 s`.
    value_html = re.sub(r"(?<=\d) ([^\d\s]\S*)", r" <small>\1</small>", escape(value))
    return f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{value_html}</div>{detail_html}</div>'


def card(title: str, key: str, body: str, *, wide: bool = False) -> str:
    """A framed picture or text under a title."""
    head = f'<div class="head"><h3>{escape(title)}</h3>{key}</div>' if title else ""
    return f'<div class="card{" wide" * wide}">{head}{body}</div>'


def legend(curves: Sequence[Curve]) -> str:
    """Which curve is which."""
    parts = "".join(
        f'<span><i style="background:var(--{curve.role})"></i>{escape(curve.label)}</span>' for curve in curves
    )
    return f'<div class="key">{parts}</div>'


def interval_legend() -> str:
    """What the marks of `interval_chart` mean."""
    return (
        '<div class="key"><span><i style="background:var(--b)"></i>forecast interval</span>'
        '<span><i style="background:var(--main)"></i>forecast</span>'
        '<span><i style="background:var(--second)"></i>measured</span></div>'
    )


def notes(sentences: Sequence[str]) -> str:
    """Small print: sentences, which are HTML."""
    return f'<p class="note" style="margin:12px 0 0">{" ".join(sentences)}</p>' if sentences else ""


def section(title: str, body: str) -> str:
    """A titled part of the page; nothing where the body is empty."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def interval_chart(
    name: str, forecast: float, low: float, high: float, measured: float | None, format_value: format_units.Formatter
) -> str:
    """One figure: the forecast with its interval as a band, the measurement as a dot."""
    limit = 1.15 * max(forecast, high, measured or 0.0) or 1.0
    track = (
        f'<div class="band" style="left:{100 * low / limit:.1f}%;width:{100 * (high - low) / limit:.1f}%"></div>'
        f'<div class="at" style="left:{100 * forecast / limit:.1f}%"></div>'
    )
    if measured is None:
        verdict = "not measured in this run"
    else:
        track += f'<div class="was" style="left:{100 * measured / limit:.1f}%"></div>'
        deviation = measured / forecast - 1 if forecast else 0.0
        inside = "within" if low <= measured <= high else "outside"
        sign = "+" if deviation >= 0 else "−"
        verdict = f"measured <b>{format_value(measured)}</b> ({sign}{format_units.format_percent(abs(deviation))}, {inside} the interval)"
    return (
        f'<div class="against"><div class="row"><h3>{name}</h3><span class="note n">forecast {format_value(forecast)} '
        f'({format_value(low)} to {format_value(high)})</span></div><div class="track">{track}</div><div class="note">{verdict}</div></div>'
    )


def stacked_bar(parts: Sequence[tuple[str, float]], format_value: format_units.Formatter) -> str:
    """Parts of a whole as one bar, with a list that names them."""
    total = sum(value for _, value in parts) or 1.0
    bar = "".join(
        f'<i style="width:{100 * value / total:.2f}%;background:var(--{colour})"></i>'
        for (_, value), colour in zip(parts, _COLOUR_VARIABLES, strict=False)
    )
    rows = "".join(
        f'<li><i style="background:var(--{colour})"></i><span>{escape(name)}</span><span class="n">{format_value(value)}</span>'
        f'<span class="n soft">{format_units.format_percent(value / total)}</span></li>'
        for (name, value), colour in zip(parts, _COLOUR_VARIABLES, strict=False)
    )
    return f'<div class="stack">{bar}</div><ul class="legend">{rows}</ul>'


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls in its own box on a narrow screen. Cells are HTML."""
    heading_row = "".join(f"<th>{escape(head)}</th>" for head in headings)
    body_rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{heading_row}</tr></thead><tbody>{body_rows}</tbody></table></div>'


def definition_list(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values. Values are HTML."""
    return '<dl class="long">' + "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in pairs) + "</dl>"


def collapsible(title: str, text: str) -> str:
    """Text that a person opens when wanted."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
