"""The command `python -m certify evaluate handover=DIR protocol=NAME ...`: the keys of configs/evaluate.yaml."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from certify.evaluation import run, tables
from certify.evaluation.settings import Options, Settings
from certify.rows.arguments import Config, Subject, data_of, handover_of, out_of, settings_of, share_of
from certify.rows.images import Share
from certizoo import UserError
from certizoo.config.schema import Section, Text, typed_values
from certizoo.progress import progress_bar


@dataclass(frozen=True)
class Protocol(Section):
    """configs/protocol."""

    name: Text
    attacks: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Keys(Subject, Share, Options):
    """configs/evaluate.yaml."""

    protocol: Protocol | None = None


def evaluate(config: Config) -> None:
    """Evaluate one hand-over, print its table, flags and paths, and tag the `version` if one is given."""
    config = typed_values(Keys, config)
    handover, protocol = handover_of(config), config["protocol"]
    out = out_of(config, handover, f"evaluation_{protocol['name']}")
    data = data_of(config, handover)
    asked = {
        "protocol": protocol["name"],
        "attacks": protocol["attacks"],
    }
    settings = settings_of(Settings, config, **asked)
    share = share_of(config)
    if share.first and config["version"]:
        raise UserError(f"first={share.first}: a version takes no figures of a range; join the ranges with parts=")
    console = Console(highlight=False, markup=False)
    with progress_bar("evaluating", console) as progress:
        summary = run.run(handover, data, settings, out, progress, share)
    console.print(tables.table(summary))
    for flag in summary["flags"]:
        console.print(f"warning: {flag['name']}: {flag['message']}", style="yellow", markup=False, soft_wrap=True)
    console.print(f"card {out / run.CARD}, bars {out / run.BARS}, rows {out / run.TABLE}", soft_wrap=True, markup=False)
    if config["version"]:
        from certizoo.registry.annotate import annotate

        tags, metrics = tables.tags(summary), tables.metrics(summary)
        version = annotate(config["version"], tags, metrics, summary["weights_sha256"])
        said = f"tags of {version.uri}: attacked_acc.{protocol['name']}.*, flags.{protocol['name']}"
        console.print(said, markup=False, soft_wrap=True)
