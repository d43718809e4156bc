"""Pieces that the report is put together from. Names and titles are escaped here; a `body` is HTML already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from echelon.observer.report.charts import Line
from echelon.plan import format_units

#: CSS variables of the parts of a whole.
_HUES = ("a", "b", "c", "d", "e", "f", "g")


def tile(name: str, value: str, more: str) -> str:
    """One figure of the summary."""
    extra = f'<div class="more">{escape(more)}</div>' if more else ""
    # Units step back behind the figure: `7,830 samples/s`, `3 min 20 s`.
    shown = re.sub(r"(?<=\d) ([^\d\s]\S*)", r" <small>\1</small>", escape(value))
    return f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{shown}</div>{extra}</div>'


def card(title: str, key: str, body: str, *, wide: bool = False) -> str:
    """A framed picture or text under a title."""
    head = f'<div class="head"><h3>{escape(title)}</h3>{key}</div>' if title else ""
    return f'<div class="card{" wide" * wide}">{head}{body}</div>'


def key(lines: Sequence[Line]) -> str:
    """Which curve is which."""
    parts = "".join(f'<span><i style="background:var(--{line.role})"></i>{escape(line.label)}</span>' for line in lines)
    return f'<div class="key">{parts}</div>'


def against_key() -> str:
    """What the marks of `against` mean."""
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


def against(name: str, told: float, low: float, high: float, was: float | None, show: format_units.Show) -> str:
    """One figure: the forecast with its interval as a band, the measurement as a dot."""
    top = 1.15 * max(told, high, was or 0.0) or 1.0
    track = (
        f'<div class="band" style="left:{100 * low / top:.1f}%;width:{100 * (high - low) / top:.1f}%"></div>'
        f'<div class="at" style="left:{100 * told / top:.1f}%"></div>'
    )
    if was is None:
        verdict = "not measured in this run"
    else:
        track += f'<div class="was" style="left:{100 * was / top:.1f}%"></div>'
        off = was / told - 1 if told else 0.0
        inside = "within" if low <= was <= high else "outside"
        sign = "+" if off >= 0 else "−"
        verdict = f"measured <b>{show(was)}</b> ({sign}{format_units.share(abs(off))}, {inside} the interval)"
    return (
        f'<div class="against"><div class="row"><h3>{name}</h3><span class="note n">forecast {show(told)} '
        f'({show(low)} to {show(high)})</span></div><div class="track">{track}</div><div class="note">{verdict}</div></div>'
    )


def stack(parts: Sequence[tuple[str, float]], show: format_units.Show) -> str:
    """Parts of a whole as one bar, with a list that names them."""
    total = sum(value for _, value in parts) or 1.0
    bar = "".join(
        f'<i style="width:{100 * value / total:.2f}%;background:var(--{hue})"></i>'
        for (_, value), hue in zip(parts, _HUES, strict=False)
    )
    rows = "".join(
        f'<li><i style="background:var(--{hue})"></i><span>{escape(name)}</span><span class="n">{show(value)}</span>'
        f'<span class="n soft">{format_units.share(value / total)}</span></li>'
        for (name, value), hue in zip(parts, _HUES, strict=False)
    )
    return f'<div class="stack">{bar}</div><ul class="legend">{rows}</ul>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls in its own box on a narrow screen. Cells are HTML."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values. Values are HTML."""
    return '<dl class="long">' + "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in pairs) + "</dl>"


def fold(title: str, text: str) -> str:
    """Text that a person opens when wanted."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
