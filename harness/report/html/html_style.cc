// SPDX-License-Identifier: Apache-2.0
// The style sheet of the page.
#include "harness/report/html/html_text.h"

namespace isoshard::html {

std::string_view style_sheet() {
  return R"(
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--paper:#fff;--line:#d0d7de;
--card:#f6f8fa;--grid:#8b949e;
--good:#116329;--bad:#a40e26;--doubt:#7d4e00;--link:#0550ae;
--c0:#0550ae;--c1:#b3450a;--c2:#1a7f37;--c3:#8250df;--c4:#a40e26;--c5:#0b6e75;--c6:#7d4e00;
--c7:#57606a;
--f0:#cfe4ff;--f1:#ffdcc4;--f2:#cdf0d4;--f3:#e9dcff;--f4:#ffd7d5;--f5:#c8edf0;--f6:#f3e3b3;
--f7:#e1e4e8}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa4ae;--paper:#0d1117;
--line:#3d444d;
--card:#161b22;--grid:#6e7681;--good:#56d364;--bad:#ff8b85;--doubt:#e3b341;--link:#79c0ff;
--c0:#79c0ff;--c1:#ffa657;--c2:#56d364;--c3:#d2a8ff;--c4:#ff8b85;--c5:#5ad1da;--c6:#e3b341;
--c7:#b1bac4;
--f0:#123a66;--f1:#5a2e10;--f2:#15452a;--f3:#412b66;--f4:#601d22;--f5:#0e4449;--f6:#4d3b0d;
--f7:#343b43}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem;max-width:72rem;font:1rem/1.5 system-ui,sans-serif;
color:var(--ink);background:var(--paper)}
h1{font-size:1.5rem;margin:0 0 .75rem}h2{font-size:1.25rem;margin-top:2rem}
h3{font-size:1.05rem;margin:1.25rem 0 .25rem}h1,h2,dd{overflow-wrap:anywhere}
code,pre,.name{font-family:ui-monospace,monospace;font-size:.875rem;overflow-wrap:anywhere}
pre{white-space:pre-wrap;background:var(--card);border:1px solid var(--line);padding:.75rem}
.verdict{border-left:.4rem solid;padding:.5rem 1rem;background:var(--card)}
.hero{padding:1rem 1.25rem;margin-bottom:1rem}.hero strong{font-size:1.25rem}
.hero dl{gap:.4rem 1rem}.hero code{color:var(--ink)}
.conforms,.match,.accepted,.reviewed,.measured{color:var(--good)}
.diverges,.regression,.refused{color:var(--bad)}
.vacuous,.incomplete,.drift,.pending,.removed,.unclear{color:var(--doubt)}
.verdict p,.verdict dl{color:var(--ink);margin:.25rem 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dd{margin:0;min-width:0}
dt{color:var(--soft)}
.scroll{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;font-size:.875rem}
caption{text-align:left;color:var(--soft);padding:.25rem 0}
th,td{border:1px solid var(--line);padding:.2rem .5rem;text-align:right;vertical-align:top}
td{white-space:nowrap}
th[scope=row],td.name,th.name{text-align:left;white-space:normal}
.s0{background:#e7f5ea;color:#10301a}.s1{background:#fff3bf;color:#3a2c00}
.s2{background:#ffd8a8;color:#40210a}.s3{background:#a40e26;color:#fff;font-weight:700}
.here{outline:.2rem solid var(--bad);outline-offset:-.2rem}
.off{color:var(--bad);font-weight:700;text-decoration:underline}.none{color:var(--soft)}
.sides{display:flex;flex-wrap:wrap;gap:.5rem 1.5rem}.sides .scroll{max-width:100%}
.pictures{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;width:12.5rem}
figcaption{font-size:.8rem;color:var(--soft);overflow-wrap:anywhere}
figcaption .name{color:var(--ink);font-size:.8rem}
.lane{margin:0;padding:0;list-style:none;display:flex;flex-wrap:wrap;gap:.25rem}
.lane li{border:1px solid var(--line);background:var(--card);padding:0 .35rem}
.lane li:not(:last-child)::after{content:" ;";color:var(--soft)}
.lane small{color:var(--soft)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;padding:0;font-size:.875rem}
.legend li{overflow-wrap:anywhere}
.legend svg{border:0;background:none;display:inline;vertical-align:middle}
svg{max-width:100%;height:auto;background:var(--card);border:1px solid var(--line)}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}
rect{stroke:var(--ink);stroke-width:.75}.grid{stroke:var(--grid);opacity:.5}
.p0{fill:var(--f0)}.p1{fill:var(--f1)}.p2{fill:var(--f2)}.p3{fill:var(--f3)}.p4{fill:var(--f4)}
.p5{fill:var(--f5)}.p6{fill:var(--f6)}.p7{fill:var(--f7)}
.line,.allowed,.spread{fill:none;stroke-width:2}.allowed{stroke-dasharray:6 4;stroke-width:1.5}
.spread{stroke:var(--soft);stroke-dasharray:1 4;stroke-linecap:round}
.band{fill:var(--grid);opacity:.35}
.l0{stroke:var(--c0)}.l1{stroke:var(--c1)}.l2{stroke:var(--c2)}.l3{stroke:var(--c3)}
.l4{stroke:var(--c4)}.l5{stroke:var(--c5)}.l6{stroke:var(--c6)}.l7{stroke:var(--c7)}
summary{cursor:pointer;padding:.25rem 0}
a{color:var(--link)}
@media (max-width:40rem){body{padding:.75rem}dl{grid-template-columns:1fr}}
@media print{body{max-width:none;padding:0;font-size:10pt}
section{break-before:auto}figure,tr,svg,.verdict{break-inside:avoid}h2,h3{break-after:avoid}
.scroll{overflow:visible}td{white-space:normal}
details::details-content{content-visibility:visible;display:block;height:auto}
.s0,.s1,.s2,.s3,rect,.verdict{print-color-adjust:exact}}
)";
}

}  // namespace isoshard::html
