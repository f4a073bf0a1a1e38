"""How a page looks: one sheet for light, dark, a phone and paper. Loads no font and no picture."""

from __future__ import annotations

#: Colours by role; names in the sheet below. First for light, then for dark.
_COLOURS = {
    "bg": ("#ffffff", "#0f1216"),
    "card": ("#f5f6f8", "#181d23"),
    "ink": ("#15181c", "#e6e9ed"),
    "dim": ("#555e69", "#a3adb8"),
    "rule": ("#d9dde3", "#2e353d"),
    "bad": ("#b3211b", "#ff8d85"),
    "bad-bg": ("#fdeae8", "#3b1a1a"),
    "good": ("#176639", "#7fdc9d"),
    "good-bg": ("#e5f4ea", "#14301f"),
    "link": ("#0a55a0", "#86b9ff"),
    "live": ("#a9c7ea", "#31557f"),
    "mark": ("#ffd9d4", "#6e2622"),
    "string": ("#7a4a00", "#e3b778"),
}
_VARIABLES = {
    number: "".join(f"--{name}:{pair[number]};" for name, pair in _COLOURS.items())
    for number in (0, 1)
}
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

STYLE = f"""
:root{{color-scheme:light dark;{_VARIABLES[0]}}}
@media (prefers-color-scheme:dark){{:root{{{_VARIABLES[1]}}}}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0 auto;max-width:64rem;padding:1.5rem 1.25rem 3rem;background:var(--bg);
color:var(--ink);font:1rem/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif;
overflow-wrap:anywhere}}
code,.source,.memory{{font-family:{_MONO};font-size:.875em}}
h1{{font-size:1.9rem;line-height:1.2;margin:.2rem 0 .25rem}}
h2{{font-size:1.15rem;margin:2.25rem 0 .6rem;padding-top:1rem;border-top:1px solid var(--rule)}}
h3{{font-size:1rem;margin:0 0 .4rem}}
p{{margin:.4rem 0}}
.kicker,.note,figcaption,.call{{color:var(--dim);font-size:.875rem;margin:.25rem 0}}
.subject{{font-size:1.1rem;margin:0 0 .6rem}}
.badge{{display:inline-block;font-size:.8rem;font-weight:600;padding:.1rem .6rem;
border-radius:1rem;background:var(--card);color:var(--dim);border:1px solid var(--rule)}}
.badge.proven{{background:var(--good-bg);color:var(--good);border-color:currentColor}}
.badge.open{{background:var(--bad-bg);color:var(--bad);border-color:currentColor}}
.do{{background:var(--card);border-left:4px solid var(--link);border-radius:4px;
padding:.7rem 1rem;margin:1rem 0}}
.do p{{margin:.15rem 0}}
.do .fix{{font-size:1.1rem;font-weight:600}}
figure{{margin:0}}
.source{{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:6px;
padding:.5rem 0;line-height:1.55}}
.source>div{{display:flex;white-space:pre;width:max-content;min-width:100%;padding-right:1rem}}
.source code{{font-size:1em}}
.source i{{flex:none;width:3.6em;padding-right:1em;text-align:right;color:var(--dim);
font-style:normal;user-select:none}}
.source .bad{{background:var(--bad-bg);box-shadow:inset 4px 0 var(--bad)}}
.source .bad i{{color:var(--bad);font-weight:700}}
.source .elided{{color:var(--dim);font-style:italic}}
.source .lane{{display:flex;flex-wrap:wrap;gap:.3rem .5rem;padding:.35rem 1rem .45rem 3.6em;
background:var(--bad-bg);box-shadow:inset 4px 0 var(--bad);white-space:normal;width:auto;
position:sticky;left:0;max-width:100%}}
.lane b,.lane span{{border:1px solid var(--bad);border-radius:4px;padding:0 .45em;
background:var(--bg);font-weight:400}}
.lane b{{color:var(--bad);font-weight:700}}
.lane strong{{flex-basis:100%;font-family:system-ui,sans-serif;font-weight:600;color:var(--bad)}}
mark{{background:var(--mark);color:inherit;border-bottom:2px solid var(--bad)}}
.w-comment{{color:var(--dim);font-style:italic}}
.w-keyword{{color:var(--link)}}
.w-string,.w-number{{color:var(--string)}}
.proof{{display:grid;gap:.5rem;margin:0;padding:0;list-style:none}}
.proof li{{border-radius:4px;padding:.45rem .8rem;background:var(--card);
border-left:4px solid var(--dim)}}
.proof .fails{{background:var(--bad-bg);border-color:var(--bad)}}
.proof .passes{{background:var(--good-bg);border-color:var(--good)}}
.proof b{{display:inline-block;min-width:4.2rem}}
.proof .fails b{{color:var(--bad)}} .proof .passes b{{color:var(--good)}}
.two{{display:grid;gap:1.5rem;grid-template-columns:minmax(0,1fr)}}
.memory{{display:block;width:100%;max-width:27rem;height:auto;font-size:11.5px}}
.memory text{{fill:var(--ink)}} .memory .small{{fill:var(--dim);font-size:10.5px}}
.memory .block{{fill:var(--live);stroke:var(--ink);stroke-width:.6}}
.memory .freed{{fill:var(--bg);stroke-dasharray:4 3}} .memory .host{{fill:var(--card)}}
.memory .blamed{{stroke:var(--bad);stroke-width:2}}
.memory .hatch{{stroke:var(--dim);stroke-width:1.2;fill:none}}
.memory .cut,.memory .leader{{fill:none;stroke:var(--dim);stroke-width:.8}}
.memory .wrong{{fill:var(--bad);fill-opacity:.28;stroke:var(--bad);stroke-width:1.5}}
.memory .wrong-label text{{fill:var(--bad);font-weight:700}}
.memory .blamed-label .name{{font-weight:700}}
.life,.time,.facts{{list-style:none;margin:0;padding:0}}
.life li{{position:relative;padding:.2rem 0 .35rem 1.1rem;border-left:2px solid var(--rule);
margin-left:.4rem}}
.life li::before{{content:"";position:absolute;left:-.37rem;top:.62rem;width:.6rem;height:.6rem;
border-radius:50%;background:var(--dim)}}
.life .wrong::before{{background:var(--bad)}} .life .wrong b{{color:var(--bad)}}
.life small,.time small{{color:var(--dim);font-size:.8125rem}}
.life small{{display:block}}
.time li{{display:grid;grid-template-columns:3.4rem 6.2rem minmax(0,1fr);gap:.5rem;
padding:.14rem .4rem;border-left:3px solid transparent;font-size:.9rem}}
.time .n{{color:var(--dim);text-align:right;font-variant-numeric:tabular-nums}}
.time .k{{color:var(--dim)}} .time .k::before{{content:"";display:inline-block;width:.62rem;
height:.62rem;margin-right:.45rem;border-radius:2px;background:var(--dim)}}
.time .launch .k::before{{background:var(--link)}}
.time .allocation .k::before{{background:var(--good)}}
.time .free .k::before{{background:none;border:2px solid var(--good)}}
.time .copy .k::before{{background:var(--string);border-radius:50%}}
.time .step{{border-top:1px solid var(--rule);margin-top:.25rem;padding-top:.35rem}}
.time .step .k::before{{background:none}}
.time .way{{border-left-color:var(--string)}}
.time .blamed,.time .fault,.time .refused{{background:var(--bad-bg);border-left-color:var(--bad)}}
.time .blamed .k,.time .fault .k,.time .refused .k{{color:var(--bad);font-weight:700}}
.time .blamed .k::before,.time .fault .k::before,.time .refused .k::before{{
background:var(--bad);border:0}}
.time .more{{display:block;color:var(--dim);font-style:italic;padding-left:4.3rem}}
.facts li{{padding:.35rem .6rem;border-bottom:1px solid var(--rule)}}
.facts .blamed{{background:var(--bad-bg);box-shadow:inset 4px 0 var(--bad)}}
.facts small{{display:block;color:var(--dim);font-size:.8125rem}}
details{{border:1px solid var(--rule);border-radius:6px;margin:.6rem 0;padding:0 .9rem}}
summary{{cursor:pointer;padding:.55rem 0;font-weight:600}}
details[open]>summary{{border-bottom:1px solid var(--rule);margin-bottom:.5rem}}
details>:last-child{{margin-bottom:.8rem}}
.cause{{padding:.35rem 0;border-bottom:1px solid var(--rule)}}
.cause ul{{margin:.2rem 0;padding-left:1.1rem}} .cause .verdict{{color:var(--dim);
font-size:.8125rem;font-weight:600;margin-right:.5rem}}
.cause .CONFIRMED{{color:var(--bad)}}
pre{{margin:.4rem 0;padding:.6rem .8rem;background:var(--card);border-radius:4px;
white-space:pre-wrap;font:.8125rem/1.45 {_MONO}}}
dl{{display:grid;grid-template-columns:8rem minmax(0,1fr);gap:.25rem .8rem;margin:.3rem 0}}
dt{{color:var(--dim)}} dd{{margin:0}}
@media (min-width:56rem){{.two{{grid-template-columns:minmax(0,27rem) minmax(0,1fr)}}}}
@media (max-width:34rem){{body{{padding:1rem .8rem 2rem}} h1{{font-size:1.5rem}}
.time li{{display:block;position:relative;padding-left:2.7rem}}
.time .n{{position:absolute;left:0;width:2.1rem}} .time .k{{margin-right:.3rem}}
.time .more{{padding-left:2.7rem}}
.source i{{width:2.6em;padding-right:.7em}} .source .lane{{padding-left:1rem}}
dl{{grid-template-columns:minmax(0,1fr);gap:0}} dd{{margin-bottom:.4rem}}}}
@media print{{:root{{{_VARIABLES[0]}}} body{{max-width:none;padding:0;font-size:10pt}}
*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
.source{{overflow:visible}} .source>div{{white-space:pre-wrap;width:auto}}
details::details-content{{content-visibility:visible;height:auto;display:block}}
.do,.proof li,.life li,.time li,.memory,.cause{{break-inside:avoid}}
h2,summary{{break-after:avoid}}}}
"""
