"""The look of the report: one style sheet, one small script, the frame around the sections. Nothing is fetched from anywhere."""

from __future__ import annotations

from html import escape

STYLE = """
:root { color-scheme: light dark;
  --paper: #f7f6f3; --card: #fff; --ink: #1c2230; --soft: #5d6675; --rule: #e5e2db; --grid: #edeae4;
  --main: #2a66c8; --second: #c4601a; --raw: #2a66c833; --good: #1f7a4d; --bad: #b3362f; --care: #8f6400;
  --a: #2a66c8; --b: #7d9fd9; --c: #c4601a; --d: #3f8f7b; --e: #a9a498; --f: #d9cfa8; --g: #cfcac0; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #11141a; --card: #191e26; --ink: #e6e9ef; --soft: #9aa4b4; --rule: #2a313c; --grid: #232a34;
  --main: #78a9f5; --second: #eb9a5b; --raw: #78a9f53d; --good: #6cc597; --bad: #ee8a83; --care: #e0b865;
  --a: #78a9f5; --b: #46689c; --c: #eb9a5b; --d: #5fb39d; --e: #6f7684; --f: #8d8358; --g: #3d4552; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; -webkit-text-size-adjust: 100%;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 20px 64px; }
header .over { color: var(--soft); font-size: 14px; margin: 0; }
h1 { font-size: clamp(26px, 5vw, 36px); line-height: 1.2; letter-spacing: -.02em; margin: 2px 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 20px; letter-spacing: -.01em; margin: 44px 0 14px; }
h3 { font-size: 15px; font-weight: 600; margin: 0; }
p { margin: 0 0 10px; max-width: 72ch; }
.soft, .note { color: var(--soft); } .note { font-size: 14px; }
code, pre { font: 13.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { background: var(--grid); border-radius: 5px; padding: 1px 6px; overflow-wrap: anywhere; }
pre { background: var(--grid); border-radius: 8px; padding: 14px 16px; margin: 8px 0 0; overflow-x: auto; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: center; color: var(--soft); margin: 0; max-width: none; }
.pill { font-size: 14px; font-weight: 600; border: 1px solid currentColor; border-radius: 99px; padding: 1px 12px; }
.good { color: var(--good); } .bad { color: var(--bad); } .care { color: var(--care); }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); margin: 26px 0 0;
  background: var(--card); border: 1px solid var(--rule); border-radius: 12px; overflow: hidden; }
.tile { padding: 14px 18px 13px; box-shadow: 0 0 0 .5px var(--rule); }
.tile .name { color: var(--soft); font-size: 14px; } .tile .more { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 23px; line-height: 1.3; font-weight: 600; letter-spacing: -.01em; font-variant-numeric: tabular-nums; }
.tile .value small { font-size: 14px; font-weight: 500; color: var(--soft); letter-spacing: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 16px 18px; min-width: 0; }
.picture svg { width: 100%; height: auto; background: #fff; border-radius: 8px; }
.card + .card.alone, .card.alone { margin-top: 16px; } .wide { grid-column: 1 / -1; }
.card .head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 16px; margin-bottom: 12px; align-items: baseline; }
.key { color: var(--soft); font-size: 13px; display: flex; flex-wrap: wrap; gap: 2px 14px; }
.key i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px; vertical-align: middle; }
.plot { position: relative; height: 210px; margin: 0 0 24px 56px; touch-action: pan-y; } .wide .plot { height: 260px; }
.plot.bars { margin-left: 0; height: 150px; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round; }
.grid { stroke: var(--grid); } .mark { stroke: var(--rule); stroke-dasharray: 3 4; } .plot rect { fill: var(--main); }
.line { stroke-width: 2; } .dot { stroke-width: 7; }
.main { stroke: var(--main); } .second { stroke: var(--second); } .raw { stroke: var(--raw); stroke-width: 1; }
.tick { position: absolute; color: var(--soft); font-size: 12px; line-height: 1; white-space: nowrap; font-variant-numeric: tabular-nums; }
.tick.y { right: calc(100% + 9px); transform: translateY(-50%); }
.tick.x { top: calc(100% + 8px); transform: translateX(-50%); }
.tick.x.first { transform: translateX(-12%); } .tick.x.last { transform: translateX(-88%); }
.tick.word { top: 2px; transform: translateX(4px); background: var(--card); padding: 1px 3px; }
.rod { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); opacity: .5; pointer-events: none; }
.tip { position: absolute; bottom: calc(100% + 3px); background: var(--ink); color: var(--card); font-size: 12px; line-height: 1.45; border-radius: 6px;
  padding: 4px 9px; white-space: pre; pointer-events: none; z-index: 2; font-variant-numeric: tabular-nums; }
.stack { display: flex; height: 14px; border-radius: 7px; overflow: hidden; gap: 1px; background: var(--grid); }
.stack i { display: block; min-width: 1px; }
.legend { list-style: none; margin: 12px 0 0; padding: 0; font-size: 14px; }
.legend li { display: grid; grid-template-columns: 18px 1fr auto 70px; padding: 2px 0; align-items: baseline; }
.legend i { width: 10px; height: 10px; border-radius: 3px; display: inline-block; } .legend .n { text-align: right; }
.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
.against { margin: 0 0 20px; } .against:last-child { margin-bottom: 4px; }
.against .row { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 14px; }
.track { position: relative; height: 12px; margin: 7px 0 5px; background: var(--grid); border-radius: 6px; }
.track .band { position: absolute; top: 0; bottom: 0; background: var(--b); border-radius: 6px; min-width: 3px; opacity: .75; }
.track .at { position: absolute; top: -3px; bottom: -3px; width: 3px; margin-left: -1px; background: var(--main); border-radius: 2px; }
.track .was { position: absolute; top: 50%; width: 14px; height: 14px; margin: -7px; border-radius: 50%; background: var(--second);
  border: 2px solid var(--card); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14.5px; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; } th, td { padding: 6px 14px 6px 0; vertical-align: baseline; }
tr + tr td, thead + tbody td { border-top: 1px solid var(--rule); } td.path { overflow-wrap: anywhere; min-width: 130px; }
dl { display: grid; grid-template-columns: minmax(110px, max-content) 1fr; gap: 5px 20px; margin: 0; font-size: 15px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
ul.plain { margin: 0; padding-left: 18px; } ul.plain li { margin: 3px 0; overflow-wrap: anywhere; }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--soft); font-size: 14px; }
footer { margin-top: 52px; padding-top: 14px; border-top: 1px solid var(--rule); color: var(--soft); font-size: 13px; }
@media (max-width: 720px) { .tiles { grid-template-columns: 1fr 1fr; } }
@media (max-width: 520px) { main { padding: 24px 14px 48px; } .card { padding: 14px; } .plot { margin-left: 48px; height: 180px; }
  .wide .plot { height: 210px; } .tile { padding: 11px 13px; } .tile .value { font-size: 20px; }
  dl.long { grid-template-columns: 1fr; gap: 0; } .long dd { margin-bottom: 8px; } }
@media print { body { background: #fff; } .card, .tiles { break-inside: avoid; } }
"""

# A rod that follows the finger and a label with the values there. Without the script the page lacks nothing else.
SCRIPT = """
for (const plot of document.querySelectorAll('[data-hover]')) {
  const hover = JSON.parse(plot.dataset.hover), rod = document.createElement('div'), tip = document.createElement('div');
  rod.className = 'rod'; tip.className = 'tip'; rod.hidden = tip.hidden = true; plot.append(rod, tip);
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect(), part = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const step = hover.low + part * (hover.high - hover.low), words = [];
    let at = null;
    for (const line of hover.lines) {
      let low = 0, high = line.points.length - 1;
      while (high - low > 1) { const mid = (low + high) >> 1; if (line.points[mid][0] < step) low = mid; else high = mid; }
      const near = Math.abs(line.points[low][0] - step) <= Math.abs(line.points[high][0] - step) ? low : high;
      const point = line.points[near];
      if (at === null) at = point[0];
      words.push(line.label + ' ' + point[1] + (point[0] === at ? '' : ' (step ' + point[0].toLocaleString('en') + ')'));
    }
    const x = (at - hover.low) / (hover.high - hover.low);
    rod.style.left = 100 * x + '%';
    tip.textContent = ['step ' + at.toLocaleString('en'), ...words].join('\\n');
    rod.hidden = tip.hidden = false;
    const wide = tip.offsetWidth, left = x * box.width;
    tip.style.left = Math.min(Math.max(left - wide / 2, -48), box.width - wide) + 'px';
  });
  plot.addEventListener('pointerleave', () => { rod.hidden = tip.hidden = true; });
}
"""

# The browser itself holds the page to its word: nothing from outside, whatever a file of the run may contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render_page(title: str, body: str) -> str:
    """The whole document."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
