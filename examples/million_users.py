"""How many GPUs do a million users need, and what happens when one of them dies?

python examples/million_users.py [--minutes 2] [--cell 32] [--costs FILE]

A million users, one in ten of them active, who ask once a minute: 1,667 requests a second, of 1,500
prompt tokens, of which 1,050 are one of 16 system prompts, and 300 output tokens. An engine with a model
of 8 billion parameters is simulated on an H200 that is not here: without a file of ``aioinfer
calibrate`` from there, its costs are a roofline. The ladder: one replica, one cell of replicas behind
one dispatcher, several cells.
"""

import argparse
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

from aioinfer import EngineConfig
from aioinfer.scheduling.costs import Costs
from aioinfer.twin.report import Figures, Slo, figures, table
from aioinfer.twin.roofline import roofline
from aioinfer.twin.running import Event, Setup, simulate
from aioinfer.twin.synthesis import Workload, synthesize

USERS, ACTIVE, PER_MINUTE = 1_000_000, 0.1, 1.0
RATE = USERS * ACTIVE * PER_MINUTE / 60
#: requests per second that one replica is asked to carry
RATES = (20, 30, 40, 50, 60)
SLO = Slo(ttft=1.0, itl=0.05)
#: of a Qwen3 of 8 billion parameters
MODEL = SimpleNamespace(
    num_hidden_layers=36, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=12288, vocab_size=151_936, max_position_embeddings=40_960,
)  # fmt: skip
MODEL.get_text_config = lambda: MODEL


def load(rate: float, seconds: float) -> Workload:
    return Workload(
        rate=rate,
        seconds=seconds,
        system_prompts=16,
        system_tokens="1050",
        prompt_tokens="lognormal:5.9:0.65:4000",  # 450 in the mean
        output_tokens="lognormal:5.42:0.75:4000",  # 300
    )


def run(setup: Setup, rate: float, seconds: float) -> Figures:
    return figures(simulate(synthesize(load(rate, seconds), setup.seed), setup), SLO)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", type=Path, help="of aioinfer calibrate; default: a roofline")
    parser.add_argument("--minutes", type=float, default=2.0, help="virtual minutes of each run")
    parser.add_argument("--cell", type=int, default=32, help="replicas of a cell")
    options = parser.parse_args()
    costs = roofline("Qwen3-8B", MODEL, "h200") if options.costs is None else Costs.read(options.costs)
    seconds, cell = 60 * options.minutes, options.cell
    setup = Setup(costs=costs, config=EngineConfig(max_running_requests=256))
    print(
        f"{costs.description}\n{RATE:,.0f} requests/s, TTFT {SLO.ttft} s, ITL {1e3 * (SLO.itl or 0):.0f} ms\n"
    )

    print("1. One replica: the load that it carries")
    rows = [(f"{rate} requests/s", run(setup, rate, seconds)) for rate in RATES]
    print(table(rows))
    carried = [rate for rate, (_, each) in zip(RATES, rows, strict=True) if (each.met or 0.0) > 0.99]
    if not carried:
        print("None of these loads is carried: a smaller model, or another machine.")
        return
    cells = math.ceil(RATE / (carried[-1] * cell))
    print(f"\n{carried[-1]} requests/s: {math.ceil(RATE / carried[-1])} replicas, {cells} cells of {cell}\n")

    print("2. One cell: what the dispatcher's policy is worth, and a replica that dies in the middle")
    rate, rows = RATE / cells, []
    for routing in ("prefix", "round_robin"):
        behind = dataclasses.replace(setup, replicas=cell, routing=routing)
        rows.append((routing, run(behind, rate, seconds)))
    killed = dataclasses.replace(setup, replicas=cell, events=(Event(seconds / 2, "kill", 1),))
    rows.append(("prefix, one dies", run(killed, rate, seconds)))
    print(table(rows))

    print("\n3. Other cells, which have other users: is the tail of ten that of one?")
    one = dataclasses.replace(setup, replicas=cell)
    print(
        table(
            [(f"cell {seed}", run(dataclasses.replace(one, seed=seed), rate, seconds)) for seed in range(3)]
        )
    )


if __name__ == "__main__":
    main()
