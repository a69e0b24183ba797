"""The style of the report: light and dark, on paper and on small screens."""

CSS = """
:root { --ink: #1b1f24; --dim: #5a6470; --paper: #fff; --card: #f5f6f8; --line: #d5dae0;
  --certified: #0072b2; --open: #e69f00; --unknown: #a65628; --wrong: #8a929c; --pgd: #c2410c; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --dim: #a3adb8; --paper: #14171b;
  --card: #1e2329; --line: #39414a; --certified: #56b4e9; --open: #f0b840; --unknown: #d99a70; --wrong: #7b848e;
  --pgd: #ff8a5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; } p { margin: .4rem 0; max-width: 46rem; }
a { color: var(--certified); } code, pre { font-family: ui-monospace, monospace; font-size: .85em; }
.dim, caption, figcaption dt { color: var(--dim); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.tiles div { background: var(--card); border-radius: .5rem; padding: .7rem .9rem; }
.tiles b { display: block; font-size: 1.6rem; line-height: 1.25; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .2rem 0; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td.text { text-align: left; overflow-wrap: anywhere; }
th[scope=row] { font-weight: 500; }
td.bar { width: 45%; } td.bar i { display: block; height: .8rem; margin-top: .35rem; background: var(--certified); }
svg { display: block; width: 100%; height: auto; background: var(--card); border-radius: .5rem; }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--line); stroke-width: .6; } svg .axis { stroke: var(--dim); }
svg .mark { stroke: var(--ink); stroke-dasharray: 5 4; }
svg .line { fill: none; stroke: var(--certified); stroke-width: 2; }
svg .band { fill: var(--certified); opacity: .18; stroke: none; }
svg .clean { stroke: var(--dim); stroke-dasharray: 2 4; stroke-width: 1.5; }
svg .whisker { stroke: var(--pgd); stroke-width: 1.5; }
svg .certified { fill: var(--certified); } svg .open { fill: var(--open); } svg .unknown { fill: var(--unknown); }
svg .wrong { fill: var(--wrong); } svg .pgd { fill: var(--pgd); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .9rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
i.certified { background: var(--certified); } i.open { background: var(--open); }
i.unknown { background: var(--unknown); }
i.wrong { background: var(--wrong); } i.pgd { background: var(--pgd); } i.clean { background: var(--dim); }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .8rem; }
figure { margin: 0; }
.gallery figure { background: var(--card); border-radius: .5rem; padding: .5rem; font-size: .82rem; }
.gallery img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; }
.gallery img.pixels { image-rendering: pixelated; }
dl { display: grid; grid-template-columns: auto 1fr; gap: 0 .5rem; margin: .4rem 0 0; }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
pre { background: var(--card); padding: .8rem; border-radius: .5rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@media screen and (max-width: 600px) { main { padding: 1rem .8rem 3rem; } svg text { font-size: 19px; }
  .wide table { font-size: .74rem; } .wide :is(th, td) { padding: .3rem .2rem; }
  .wide th:first-child { overflow-wrap: normal; } main > table th:first-child { min-width: 5.2rem; }
  .tiles { grid-template-columns: 1fr 1fr; } th, td { padding: .3rem; } td.bar { width: 30%; } }
@media print { main { max-width: none; padding: 0; } figure, svg, tr, .tiles div { break-inside: avoid; }
  h2, h3 { break-after: avoid; } * { print-color-adjust: exact; } details { display: none; } }
"""
