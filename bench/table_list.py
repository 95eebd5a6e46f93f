"""The tables that bench/tables writes: for each the commands whose JSON objects are its rows, and its columns.

A column names a row, is counted (it follows from the tree: bytes, rounds, entries, simulated times) or measured. Counted sources take
seconds: a test runs them all. `weft` is the one that was built, `--json` its objects (docs/measuring.md).
"""
from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from rows import Row, bytes_text, duration_text, table

Key = tuple[str, ...]  # the cells that name a row
ByKey = dict[Key, Row]
Find = Callable[[str, str, str], str]  # a table's name, its row's, a column's title: the cell


class Kind(Enum):
    NAME = "names the row"
    COUNTED = "follows from the tree"
    MEASURED = "is measured"


class Column(NamedTuple):
    title: str
    text: Callable[[Row], str]
    kind: Kind = Kind.MEASURED
    agrees: bool = True  # counted: a measured run must have counted the same


class Source(NamedTuple):
    command: str  # bash, at the root of the tree; as it stands in the document
    counted: bool = False
    more: tuple[Row, ...] = ()  # what its objects get beside their own fields: one for all or one for each
    slow: bool = False  # many minutes


class Table(NamedTuple):
    name: str  # DOCUMENT/TABLE: of docs/results/DOCUMENT.md
    minutes: float
    columns: tuple[Column, ...]
    sources: tuple[Source, ...]
    derive: Callable[[ByKey, ByKey], None] = lambda counted, measured: None  # fields that need several rows
    slow_minutes: float = 0

    def commands(self) -> str:
        lines = [source.command + ("   # counted" if source.counted else "") for source in self.sources]
        return "\n".join(["```", *dict.fromkeys(lines), "```"]) + "\n"


def name(title: str, text: Callable[[Row], str]) -> Column:
    return Column(title, text, Kind.NAME)


def counted(title: str, text: Callable[[Row], str], *, agrees: bool = True) -> Column:
    return Column(title, text, Kind.COUNTED, agrees)


def field(key: str, form: Callable[[Any], str] = str) -> Callable[[Row], str]:
    """Of an object that has it: else a dash."""
    return lambda row: "-" if row.get(key) is None else form(row[key])


def integer(value: float) -> str:
    return f"{value:,.0f}"


def fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def rate_text(bytes_per_second: float) -> str:
    mbit = 8e-6 * bytes_per_second
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def link_name(link: str) -> str:
    """Of a --link."""
    number, prefix = re.findall(r"^([\d.]+)([kmg])bit", link)[0]
    return rate_text(float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[prefix] / 8)


def system(row: Row) -> str:
    its = "Open MPI, " if row.get("transport") == "Open MPI" else ""
    return row.get("system") or its + row["algorithm"].replace("_", " ")


MEDIAN = Column("median", field("seconds_median", duration_text))
P99 = Column("p99", field("seconds_p99", duration_text))
PAYLOAD = counted("bytes a rank", field("payload_bytes_per_rank", integer))
ROUNDS = counted("rounds", field("rounds", integer))

# ---- engine ----

ALLREDUCE = "weft bench allreduce --ranks 4 --bytes 64MiB"
FAMILIES = {"allreduce": "4MiB", "reducescatter": "4MiB", "allgather": "1MiB", "broadcast": "4MiB", "alltoall": "1MiB"}
MPI_ALGORITHMS = {0: "as it comes", 4: "ring", 5: "segmented ring", 6: "rabenseifner"}  # those of its tuned ones that come near
LAB = "tools/netlab run --hosts {hosts} --rate {rate} -- "
SIMULATED = "--transport sim --ranks 4 --link 1gbit,50us"


def mpi_name(algorithm: int) -> str:
    return f"Open MPI, {MPI_ALGORITHMS[algorithm]} ({algorithm})"


def mpi_peers(hosts: int, rate: str, arguments: str, algorithms: Sequence[int], *, slow: bool = False) -> Source:
    return Source(f"for a in {' '.join(map(str, algorithms))}; do tools/netlab run --hosts {hosts} --rate {rate} --mpi \\\n"
                  "  --mpi-arg '--mca coll_tuned_use_dynamic_rules 1' --mpi-arg \"--mca coll_tuned_allreduce_algorithm $a\" -- \\\n"
                  f"  build/release/bench/mpi_peer allreduce {arguments} --json; done",
                  more=tuple({"system": mpi_name(a)} for a in algorithms), slow=slow)


def of_the_link(_: ByKey, measured: ByKey) -> None:
    ideal = next((row["ideal_seconds"] for row in measured.values() if row.get("ideal_seconds")), None)
    for row in measured.values():
        row["of_link"] = ideal / row["seconds_median"] if ideal else None


def simulated_over_measured(simulated: ByKey, measured: ByKey) -> None:
    for key, row in measured.items():
        row["simulated_over"] = simulated[key]["seconds_median"] / row["seconds_median"]


ENGINE = (
    Table("engine/allreduce", 0.5, (
        name("algorithm", system), PAYLOAD, ROUNDS, MEDIAN, P99,
        Column("Open MPI's best", field("mpi_seconds_median", duration_text)), Column("which", field("mpi_algorithm")),
        Column("speed over it", field("speed_over_mpi", fixed(2)))),
        (Source(ALLREDUCE + " --against mpi --json"), Source(ALLREDUCE + " --transport sim --byte-scale 64 --json", counted=True))),
    Table("engine/families", 1, (
        name("family", field("family")), name("algorithm", system), PAYLOAD, ROUNDS,
        counted("simulated", field("seconds_median", duration_text), agrees=False), MEDIAN, P99,
        Column("of the link", field("efficiency", percent))),
        tuple(Source(f"weft bench {family} --bytes {size} {how} --json", counted=how == SIMULATED)
              for how in ("--ranks 4 --link 1gbit,50us", SIMULATED) for family, size in FAMILIES.items())),
    Table("engine/tcp", 1.5, (
        name("", system), PAYLOAD, ROUNDS, MEDIAN, P99, Column("of the link", field("of_link", percent))),
        (Source(LAB.format(hosts=4, rate="1gbit") + "weft bench allreduce --bytes 16MiB --algorithm ring,rabenseifner \\\n"
                "  --ideal 1gbit --iterations 15 --json"),
         mpi_peers(4, "1gbit", "--bytes 16MiB --iterations 12", tuple(MPI_ALGORITHMS)),
         Source(f"weft bench allreduce --bytes 16MiB --algorithm ring,rabenseifner {SIMULATED} --byte-scale 16 --json", counted=True)),
        derive=of_the_link),
    Table("engine/priority", 0.5, (
        name("", system), Column("link idle", field("idle_seconds", duration_text)),
        Column("beside gradients", field("priority_seconds", duration_text)), Column("x idle", field("priority_ratio", fixed(2))),
        Column("first come, first served", field("fifo_seconds", duration_text)), Column("fifo x idle", field("fifo_ratio", fixed(1)))),
        (Source("weft bench priority --ranks 4 --link 1gbit,50us --json", more=({"system": "shaped"},)),
         Source(LAB.format(hosts=4, rate="1gbit") + "weft bench priority --json", more=({"system": "tcp, netlab"},)))),
    Table("engine/overhead", 0.1, (
        name("", system), Column("through the engine", field("engine_seconds", duration_text)),
        Column("as a bare coroutine", field("bare_seconds", duration_text)),
        Column("the engine adds", field("added_seconds", duration_text))),
        (Source("weft bench overhead --json", more=({"system": "4 bytes, 2 ranks on threads, 64 in flight"},)),)),
    Table("engine/simulator", 0.5, (
        name("family", field("family")), name("algorithm", system), counted("simulated", field("seconds_median", duration_text), agrees=False),
        Column("netlab", field("seconds_median", duration_text)),
        Column("simulated / netlab", field("simulated_over", fixed(2)))),
        tuple(Source(f"{LAB.format(hosts=4, rate='1gbit') if lab else ''}weft bench {what} {'--iterations 15' if lab else SIMULATED} --json",
                     counted=not lab)
              for lab in (True, False)
              for what in ("allreduce --bytes 4MiB --algorithm ring,rabenseifner", "allgather --bytes 1MiB --algorithm ring,bruck")),
        derive=simulated_over_measured),
    Table("engine/scale", 0.2, (
        name("family", field("family")), name("algorithm", system), PAYLOAD, ROUNDS,
        counted("simulated", field("seconds_median", duration_text)),
        Column("wall time of the command", field("command_seconds", duration_text))),
        tuple(Source(f"weft bench {what} --transport sim --ranks 1024 --json", counted=is_counted)
              for is_counted in (True, False)
              for what in ("allgather --bytes 1KiB --algorithm bruck", "alltoall --bytes 64 --algorithm pairwise"))),
)

# ---- spardl ----

DENSE_PEERS = (0, 4, 5)  # of MPI_ALGORITHMS
METHODS = "spardl,topka,topkdsa,gtopk,dense,dense-bf16"
SPARSE = "weft bench sparse_allreduce --density 0.01"


def over_best_dense(_: ByKey, measured: ByKey) -> None:
    """Over Open MPI where it ran, else over dense float32."""
    peers = [row["seconds_median"] for row in measured.values() if "system" in row] or [
        row["seconds_median"] for row in measured.values() if row["algorithm"] == "dense"]
    for row in measured.values():
        row["over_dense"] = min(peers) / row["seconds_median"] if peers else None


METHOD = (
    name("method", system), counted("teams", field("teams", integer)), ROUNDS,
    counted("bytes at most", field("formula_bytes_per_rank", bytes_text), agrees=False),
    Column("bytes a rank", field("payload_bytes_per_rank", bytes_text)),
    MEDIAN, P99, Column("selection", field("select_seconds", duration_text)), Column("wire alone", field("wire_seconds", duration_text)))
OVER_DENSE = Column("speed over the best dense", field("over_dense", fixed(2)))
CHOSEN = (Column("entries out", field("entries_out", integer)), Column("captured energy", field("captured_energy", fixed(3))))


def hosts(count: int, rate: str, arguments: str) -> str:
    return LAB.format(hosts=count, rate=rate) + f"{SPARSE} {arguments} --json"


def counted_methods(ranks: int, link: str, length: int, algorithms: str) -> Source:
    """Of a part of the elements, in which a rank's blocks still have 625 entries each."""
    scale = length // (62500 * ranks)
    return Source(f"{SPARSE} --transport sim --ranks {ranks} --link {link},50us --length {length} --algorithm {algorithms} \\\n"
                  f"  --byte-scale {scale} --no-check --json", counted=True)


def energy_per_k(counted_rows: ByKey, _: ByKey) -> None:
    for row in counted_rows.values():
        row["per_k"] = row["captured_energy"] * row["k"] / row["entries_out"]


LAYERED = f"{SPARSE} --transport sim --distribution layered --algorithm spardl --teams 1"
ENERGY = (counted("captured energy", field("captured_energy", fixed(3))), counted("share of all energy", field("energy_share", fixed(3))),
          counted("entries out", field("entries_out", integer)), counted("bytes a rank", field("payload_bytes_per_rank", bytes_text)))

SPARDL = (
    Table("spardl/counted", 0.1, (
        name("ranks", field("ranks", integer)), name("method", system), name("codec", field("codec")),
        counted("teams", field("teams", integer)), counted("gather", field("gather")), ROUNDS,
        counted("rounds by the formula", field("formula_rounds", integer)), PAYLOAD,
        counted("bytes by the formula", lambda row: ("at most " if row["formula_is_bound"] else "") + integer(row["formula_bytes_per_rank"])),
        counted("entries out", field("entries_out", integer)), counted("simulated", field("seconds_median", duration_text))),
        tuple(Source(f"{SPARSE} --transport sim --ranks {ranks} --length 100000 --codec {codec} --algorithm {algorithms} --json", counted=True)
              for ranks in (4, 8, 14)
              for codec, algorithms in (("coo", "spardl"), ("packed", "spardl,topka,topkdsa,gtopk,oktopk,dense")))),
    Table("spardl/hosts_4", 4, (*METHOD, *CHOSEN, OVER_DENSE),
          (Source(hosts(4, "1gbit", f"--length 25000000 --algorithm {METHODS} --iterations 15")),
           Source(hosts(4, "1gbit", "--length 25000000 --algorithm oktopk --steps-before 520 --iterations 15"), slow=True),
           mpi_peers(4, "1gbit", "--bytes 100000000 --iterations 5", DENSE_PEERS),
           counted_methods(4, "1gbit", 25000000, METHODS + ",oktopk")), derive=over_best_dense, slow_minutes=12),
    Table("spardl/hosts_8", 3, (*METHOD, OVER_DENSE),
          (Source(hosts(8, "1gbit", f"--length 25000000 --algorithm {METHODS} --iterations 7 --no-check")),
           counted_methods(8, "1gbit", 25000000, METHODS)), derive=over_best_dense),
    Table("spardl/settled", 1, (*METHOD, *CHOSEN),
          (Source(hosts(8, "1gbit", "--length 5000000 --algorithm spardl,topka,topkdsa,gtopk --iterations 15")),
           Source(hosts(8, "1gbit", "--length 5000000 --algorithm oktopk --steps-before 520 --iterations 15"), slow=True),
           counted_methods(8, "1gbit", 5000000, "spardl,topka,topkdsa,gtopk,oktopk")), slow_minutes=5),
    Table("spardl/energy", 0.5, (
        name("ranks", field("ranks", integer)), name("step", lambda row: integer(row["steps_before"] + row["iterations"])),
        name("method", system), counted("teams", field("teams", integer)), counted("entries out", field("entries_out", integer)),
        counted("captured energy", field("captured_energy", fixed(3))), counted("per k entries", field("per_k", fixed(3)))),
        tuple(Source(f"{SPARSE} --transport sim --ranks {ranks} --length 100000 --algorithm spardl,oktopk,gtopk --steps-before {before} \\\n"
                     "  --iterations 15 --json", counted=True, slow=before > 15) for ranks in (4, 8) for before in (15, 127, 520)),
        derive=energy_per_k, slow_minutes=3),
    Table("spardl/slow_link", 6, (*METHOD, OVER_DENSE),
          (Source(hosts(4, "100mbit", "--length 25000000 --algorithm spardl,topka,topkdsa,gtopk --iterations 7 --no-check")),
           Source(hosts(4, "100mbit", "--length 25000000 --algorithm dense,dense-bf16 --steps-before 1 --iterations 3 --no-check")),
           Source(hosts(4, "100mbit", "--length 25000000 --algorithm oktopk --steps-before 520 --iterations 7 --no-check"), slow=True),
           mpi_peers(4, "100mbit", "--bytes 100000000 --iterations 3", (5,)),
           counted_methods(4, "100mbit", 25000000, METHODS + ",oktopk")), derive=over_best_dense, slow_minutes=15),
    Table("spardl/select", 1.5, (
        name("data", lambda row: row["name"].split("/")[1]), name("blocks", lambda row: row["name"].split("/")[2]),
        Column("selection", lambda row: duration_text(1e-3 * (row["estimate_ms"] + row["accumulate_ms"] + row["cut_ms"]))),
        Column("one pass", lambda row: duration_text(1e-3 * row["pass_ms"])), Column("ratio", field("ratio", fixed(2)))),
        (Source("build/release/bench/bench_select --benchmark_filter=^select/ --benchmark_format=json"),)),
    Table("spardl/codecs", 0.3, (
        name("codec", lambda row: row.get("codec") or row["name"].split("/")[1]),
        counted("bytes an entry", field("bytes_per_entry", fixed(2)), agrees=False),
        Column("encode 250,000 entries", field("encode_ms", lambda ms: duration_text(1e-3 * ms))),
        Column("decode", field("decode_ms", lambda ms: duration_text(1e-3 * ms)))),
        (Source("build/release/bench/bench_select --benchmark_filter=^codec/ --benchmark_format=json"),
         *(Source(f"{SPARSE} --transport sim --ranks 4 --teams 1 --algorithm spardl --codec {codec} --json", counted=True)
           for codec in ("coo", "packed", "packed-bf16")))),
    Table("spardl/blocks", 0.1, (name("8 ranks, one vector", lambda row: f"{row['blocks']} blocks"), *ENERGY),
          tuple(Source(f"{LAYERED} --ranks 8 --blocks {blocks} --json", counted=True) for blocks in ("dealt", "contiguous"))),
    Table("spardl/buckets", 0.1, (
        name("4 ranks, dealt blocks", lambda row: f"{row['buckets']} buckets, {row['quotas']} quotas" if row["buckets"] else "one vector"),
        *ENERGY),
        tuple(Source(f"{LAYERED} --ranks 4 --steps-before 10 --iterations 5{more} --json", counted=True)
              for more in ("", " --buckets 16 --quotas adaptive", " --buckets 16 --quotas proportional"))),
    Table("spardl/crossover", 0.1, (
        name("ranks", field("ranks", integer)), name("link", field("link_bytes_per_second", rate_text)),
        counted("dense", field("dense_seconds", duration_text)), counted("dense wins above density", field("crossover_density", fixed(3))),
        counted("n, x", lambda row: f"{row['crossover_elements']:,}, {row['crossover_byte_scale']:.0f}"),
        counted("one team", field("one_team_seconds", duration_text)),
        counted("R-SAG, teams", lambda row: f"{duration_text(row['teams_seconds'])}, {row['teams']}"),
        counted("B-SAG, teams", lambda row: f"{duration_text(row['teams_b_sag_seconds'])}, {row['teams_b_sag']}"),
        counted("teams' n, x", lambda row: f"{row['teams_elements']:,}, {row['teams_byte_scale']:.0f}")),
        tuple(Source(f"{SPARSE} --transport sim --crossover --length 25000000 --ranks {ranks} --json", counted=True, slow=ranks > 14)
              for ranks in (14, 64, 256, 1024)), slow_minutes=4),
)

# ---- training ----

DEMO = "--ranks 4 --link 100mbit,50us --vocabulary 8000 --width 192 --layers 4 --heads 4 --context 64"  # as in the Makefile
SWEPT = "--model gpt --vocabulary 8000 --width 256 --layers 4 --heads 4 --length 64"


def interval(row: Row, low: str, high: str, form: Callable[[float], str]) -> str:
    return f"{form(row[low])} .. {form(row[high])}"


def speed_up(row: Row) -> str:
    low_to_high = interval(row, "speedup_low", "speedup_high", fixed(2))
    return "1" if row["scheme"] == row["baseline"] else f"{row['speedup_over_baseline']:.2f} ({low_to_high})"


def limits(row: Row) -> str:
    return "" if row["scheme"] == row["baseline"] else f"{row['speedup_limit']:.2f} / {row['bytes_ratio']:.1f}"


COMPARED = (
    Column("step", field("step_seconds_median", duration_text)),
    Column("95 %", lambda row: interval(row, "step_seconds_low", "step_seconds_high", duration_text)),
    Column("over dense", speed_up), Column("limits: time / bytes", limits),
    Column("bytes a step", field("payload_bytes_per_step", bytes_text)), Column("formula", field("formula_bytes_per_step", bytes_text)),
    Column("exposed", field("exposed_share", percent)))

TRAINING = (
    Table("training/demo", 3, (
        name("scheme", field("scheme")), counted("parameters", field("parameters", integer)),
        counted("bytes by the plan", field("busiest_port_bytes", bytes_text), agrees=False), *COMPARED,
        Column("loss to dense", field("loss_gap", lambda gap: f"{gap:+.4f}"))),
        (Source(f"rm -rf build/bench/demo; weft compare {DEMO} --steps 20 --out build/bench/demo --json"),
         Source(f"for s in dense dense-bf16 powersgd topka oktopk spardl; do weft plan {DEMO} --scheme $s --json; done", counted=True))),
    Table("training/sweep", 0, (
        name("link", lambda row: link_name(row["link"])), name("scheme", field("scheme")), Column("bucket", field("bucket_mib", "{:g} MiB".format)),
        *COMPARED),
        (Source("mkdir -p build/bench; cd build/bench   # resumes\n"
                f'M="{SWEPT}"\n'
                "[ -e outline.json ] || weft outline $M --ranks 1 --global-batch 8 -o outline.json\n"
                "weft compare $M --ranks 8 --global-batch 64 --schemes dense,dense-bf16,powersgd,spardl,topka,oktopk,gtopk --try-buckets 1,4,25 \\\n"
                "  --compute emulated --outline outline.json --sweep link=2gbit,1gbit,500mbit,250mbit,125mbit,62500kbit --out sweep --json\n"
                "cp sweep/speedup.svg ../../docs/results/speedup_gpt_8_ranks_emulated.svg", slow=True),), slow_minutes=50),
)

# ---- step ----

OUTLINED = ("mkdir -p build/bench; weft outline --model gpt --vocabulary 8000 --width 192 --layers 4 --heads 4 --context 64 \\\n"
            "  --global-batch 4 --ranks 1 -o build/bench/demo.outline")
LINKS = ("1gbit", "200mbit", "50mbit")
PREDICTED = ("dense", "spardl", "powersgd")
WARM_UP = 3  # steps


def emulated_step(row: Row) -> float:
    return statistics.median(row["step_seconds"][WARM_UP:])


STEP = (
    Table("step/predicted", 2, (
        name("link", field("system")), name("scheme", field("scheme")), Column("emulated", lambda row: duration_text(emulated_step(row))),
        Column("predicted", field("predicted_step_seconds", duration_text)),
        Column("predicted / emulated", lambda row: f"{row['predicted_step_seconds'] / emulated_step(row):.3f}")),
        (Source(f"{OUTLINED}\n"
                f"for link in {' '.join(LINKS)}; do for scheme in {' '.join(PREDICTED)}; do rm -rf build/bench/predicted\n"
                "  weft train --compute emulated --outline build/bench/demo.outline --ranks 4 --link $link,50us --steps 12 --scheme $scheme \\\n"
                "    --out build/bench/predicted >&2; tr -d '\\n' <build/bench/predicted/summary.json; echo; done; done",
                more=tuple({"system": link_name(link), "scheme": scheme} for link in LINKS for scheme in PREDICTED)),)),
)

TABLES = (*ENGINE, *SPARDL, *TRAINING, *STEP)

# ---- README ----


class Readme(NamedTuple):
    name: str
    text: Callable[[Find], str]


def readme_numbers(find: Find) -> str:
    """Each from the table that its command writes."""
    seconds_of = lambda text: float(text.split()[0]) * {"s": 1, "ms": 1e-3, "us": 1e-6}[text.split()[1]]  # noqa: E731
    best = lambda texts: min(texts, key=seconds_of)  # noqa: E731

    def open_mpi(of: str, algorithms: Sequence[int]) -> str:
        return best([find(of, mpi_name(a), "median") for a in algorithms])

    priority = lambda title: find("engine/priority", "shaped", title)  # noqa: E731

    def step(rate: str, tokens: int) -> list[str]:
        point = rate.replace(" ", "").replace("/s", "").lower()
        its = lambda system: find(f"training/ddp_{point}", system, "step")  # noqa: E731
        stock = best([its(f"DDP + Gloo{how}") for how in (" as it comes", ", buckets of 1 MiB", ", buckets of 4 MiB")])
        return [f"a training step of a 20 M gpt, 4 hosts at {rate}, {tokens} tokens a rank",
                f"spardl 1 %: {its('**weft spardl, 1 %**')}; dense: {its('**weft dense**')}",
                f"DDP over Gloo at its best: {stock}; with its PowerSGD hook: {its('DDP + PowerSGD hook, rank 1, one bucket')}",
                f"`bench/against_ddp --points {point}:{tokens}` (as root)"]

    def losses(gpt: str, lm: str) -> str:
        return ", ".join(f"{find(of, recipe, 'gap to dense')} with {find(of, recipe, BYTES)}"
                         for of, recipe in (("training/gpt_mini", gpt), ("training/lm_mini", lm)))

    return table(["", "weft", "instead", "command"], [
        ["all-reduce, 64 MiB, 4 ranks in one process", find("engine/allreduce", "ring", "median"),
         "Open MPI's best: " + find("engine/allreduce", "ring", "Open MPI's best"), "`weft bench allreduce --bytes 64MiB --against mpi`"],
        ["all-reduce, 16 MiB, 4 hosts at 1 Gbit/s (tcp, netlab)",
         f"{find('engine/tcp', 'ring', 'median')}, {find('engine/tcp', 'ring', 'of the link')} of the link",
         f"Open MPI's best: {open_mpi('engine/tcp', tuple(MPI_ALGORITHMS))}", "`bench/tables --only engine/tcp` (as root)"],
        [f"all-to-all of 1 MiB to each peer beside gradients (alone {priority('link idle')})", priority("beside gradients"),
         "without priority: " + priority("first come, first served"), "`weft bench priority --ranks 4 --link 1gbit,50us`"],
        ["sparse all-reduce of 25 M float32 at 1 %, 4 hosts at 1 Gbit/s",
         f"{find('spardl/hosts_4', 'spardl', 'median')} (wire alone {find('spardl/hosts_4', 'spardl', 'wire alone')})",
         f"Open MPI's best dense: {open_mpi('spardl/hosts_4', DENSE_PEERS)}", "`bench/tables --only spardl/hosts_4` (as root)"],
        *(step(rate, tokens) for rate, tokens in (("1 Gbit/s", 64), ("200 Mbit/s", 128))),
        ["loss after 800 steps against dense, 3 seeds, 4 ranks, best sparse recipe of a small gpt, lm (share of dense's bytes)", losses(GPT_BEST, LM_BEST),
         f"dense-bf16: {losses('dense-bf16', 'dense-bf16')}; PowerSGD: {losses('powersgd-4', 'powersgd-4')}", "docs/results/training.md (hours)"],
        ["what the engine adds to a 4-byte all-reduce, 64 in flight",
         find("engine/overhead", "4 bytes, 2 ranks on threads, 64 in flight", "the engine adds"), "", "`weft bench overhead`"],
    ]) + "\n"


BYTES = "bytes of dense's"
GPT_BEST, LM_BEST = "**spardl-0.1-warm**", "**spardl-0.1-layered**"
README = Readme("readme/numbers", readme_numbers)
