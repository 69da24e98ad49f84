"""The pictures of README and docs/, and the table of docs/choose.md, from bench/results: python -m bench.pictures"""

import json
import re
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullFormatter

from fastfact.experiment import plots, report

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURES = ROOT / "bench" / "results", ROOT / "docs" / "pictures"
SCENARIOS = ("permuted-iid", "permuted-non-iid", "domains")
SHOWN = {
    "stand-alone": "stand-alone",
    "fedavg": "fedavg",
    "fedrep": "fedrep",
    "fedprox": "fedprox",
    "clustered-fl": "clustered-fl",
    "lg-fedavg": "lg-fedavg",
    "fedamp": "fedamp",
    "fedfomo": "fedfomo",
    "factorized-fl-alpha": "factorized-fl-alpha, svd",
    "factorized-fl-beta": "factorized-fl-beta, svd",
    "factorized-fedavg": "factorized-fedavg, svd",
    "simfed": "simfed, svd",
    "feddecomp": "feddecomp",
    "fedfac-dynamic": "fedfac-dynamic",
    "fedfac-static": "fedfac-static",
}
"""Method → its row in claims.json."""


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def point(path: Path) -> None:
    """What the package is for: layers that are faster the sparser μ is, and accuracy for what is sent."""
    figure, (left, right) = plots.new_axes(10, 3.8, columns=2)
    rows = [row for row in report.read_layers(RESULTS / "layers.json") if row["shape"].startswith("all")]
    for index, op in enumerate(report.RATIO_OPS):
        of = sorted((100 * r["density"], r["ratio"]) for r in rows if r["op"] == op and r["format"] == "nchw")
        left.plot(*zip(*of, strict=True), marker="o", label=report.RATIO_OPS[op], **plots.line_look(index))
    left.axhline(1, color="#333333", linewidth=0.8)
    left.set(xlabel="Density of μ [%]", title="Layers: times as fast as dense", yscale="log", yticks=[1, 2, 3, 4, 6])
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    left.grid(alpha=0.3)
    left.legend(frameon=False)
    for index, row in enumerate(read("demo.json")["table"]):
        sent, mean, std = row["uplink"] + row["downlink"], *(100 * row["accuracy"][part] for part in ("mean", "std"))
        colour = plots.COLOURS[index]
        if sent == 0:
            right.axhline(mean, color=colour, linestyle="--", label=f"{row['method']} (sends nothing)")
            continue
        right.errorbar(sent, mean, yerr=std, fmt="o", color=colour, capsize=3, markersize=7, label=row["method"])
    right.set(xlim=(60e6, 100e6), xlabel="Bytes sent in 12 rounds, both ways, 20 clients")
    right.set(title="make demo: accuracy [%] over bytes", ylim=(60, 95))
    right.xaxis.set_major_formatter(lambda value, _: report.size(value).replace(".00", ""))
    right.grid(alpha=0.3)
    right.legend(frameon=False, fontsize=8, ncols=2, loc="lower center")
    plots.save(figure, path)


def networks(path: Path) -> None:
    """Whole networks: a training step's time / ours at a tenth of μ, or less."""
    shown = {"op": "step", "format": "channels_last", "dtype": "float32"}
    rows = [
        row for row in read("networks.json")["rows"] if shown.items() <= row.items() and row["density"] in (0.05, 0.1)
    ]
    figure, (ax,) = plots.new_axes(8, 0.9 + 0.22 * len(rows))
    names = [f"{row['shape']}, batch {row['batch']}, μ {100 * row['density']:.0f} %" for row in rows]
    ax.barh(range(len(rows)), [row["ratio"] for row in rows], color=plots.COLOURS[0])
    ax.axvline(1, color="#333333", linewidth=0.8)
    ax.set(yticks=range(len(rows)), yticklabels=names, xlabel="Times as fast as the dense network, a training step")
    ax.invert_yaxis()
    plots.save(figure, path)


def clients(path: Path) -> None:
    """Many clients: the time of others / ours."""
    rows = [row for row in read("clients.json")["rows"] if row.get("client_rounds_per_second")]
    ours = {row["work"]: row["client_rounds_per_second"] for row in rows if row["side"] == "ours"}
    sides = [side for side in dict.fromkeys(row["side"] for row in rows) if side != "ours"]
    works = [work for work in ours if any(row["work"] == work and row["side"] in sides for row in rows)]
    figure, (ax,) = plots.new_axes(8, 4)
    width = 0.8 / len(sides)
    for index, side in enumerate(sides):
        of = {row["work"]: ours[row["work"]] / row["client_rounds_per_second"] for row in rows if row["side"] == side}
        at = [place - 0.4 + width * (index + 0.5) for place, work in enumerate(works) if work in of]
        ax.bar(at, [of[work] for work in works if work in of], width * 0.9, color=plots.COLOURS[index], label=side)
    ax.axhline(1, color="#333333", linewidth=0.8)
    ax.set(xticks=range(len(works)), xticklabels=works, yscale="log", ylabel="Time of a round / ours")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.legend(frameon=False)
    plots.save(figure, path)


def table() -> str:
    """docs/choose.md: accuracy in three scenarios, and the bytes of a client and round."""
    claims = read("claims.json")["table"]
    sent = {row["method"]: row for row in read("communication.json")["rows"]}
    lines = ["| method | permuted IID | permuted non-IID | domains | up | down |", "|---|---|---|---|---|---|"]
    for method, name in SHOWN.items():
        found = []
        for scenario in SCENARIOS:
            of = claims[name].get(scenario, {})
            value = of.get("recalibrated") or of.get("accuracy")
            found.append(f"{100 * value['mean']:.1f} ± {100 * value['std']:.1f}" if value else "–")
        traffic = [report.size(sent[method][way]) if method in sent else "–" for way in ("up", "down")]
        lines.append("| " + " | ".join([f"`{method}`", *found, *traffic]) + " |")
    return "\n".join(lines)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    point(PICTURES / "point.png")
    networks(PICTURES / "networks.png")
    clients(PICTURES / "clients.png")
    plots.plot_ratio(report.read_layers(RESULTS / "layers.json"), PICTURES / "layers.png")
    page = ROOT / "docs" / "choose.md"
    text = page.read_text()
    made = f"<!-- figures -->\n{table()}\n<!-- end of figures -->"
    page.write_text(re.sub(r"<!-- figures -->.*<!-- end of figures -->", lambda _: made, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
