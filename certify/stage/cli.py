"""The command `python -m certify handover=DIR [data=NAME data.root=FOLDER] [eps=[...]] ...`.

Its keys are those of configs/certify.yaml and configs/certify/stage.yaml.
"""

from dataclasses import dataclass

from rich.console import Console

from certify.rows.arguments import Config, Subject, data_of, handover_of, out_of, settings_of, share_of
from certify.rows.images import Share
from certify.stage import register, run, tables
from certify.stage.settings import Settings
from certizoo import UserError
from certizoo.config.schema import Count, Section, typed_values
from certizoo.progress import progress_bar
from certizoo.registry.tracking.checks import ExperimentName, ModelName
from zoo.user_models import is_function


@dataclass(frozen=True)
class PublishKeys(Section):
    """`registry`: where `publish` registers the version."""

    experiment: ExperimentName = "certify"
    champion_images: Count = 300


@dataclass(frozen=True)
class Keys(Subject, Share, Settings):
    """configs/certify.yaml."""

    publish: ModelName | None = None
    registry: PublishKeys = PublishKeys()


def certify(config: Config) -> None:
    """Certify one hand-over, print its table and the paths of the results, and publish it if asked to."""
    config = typed_values(Keys, config)
    if config["publish"] and is_function(str(config["model"])):
        raise UserError("publish= takes models of the zoo: a version must not run code of yours where it is loaded")
    handover = handover_of(config)
    out = out_of(config, handover, "certificate")
    data = data_of(config, handover)
    share = share_of(config)
    if share.first and config["publish"]:
        raise UserError(f"first={share.first}: a certificate of a range is not published; join the ranges with parts=")
    settings = settings_of(Settings, config)
    console = Console(highlight=False, markup=False)
    with progress_bar("certifying", console) as progress:
        summary = run.run(handover, data, settings, out, progress, share)
    console.print(tables.table(summary))
    console.print(
        f"curve {out / run.CURVE}, card {out / run.CARD}, rows {out / run.TABLE}", soft_wrap=True, markup=False
    )
    console.print(f"report {out / run.REPORT}", soft_wrap=True, markup=False)
    if config["publish"]:
        line = register.publish(
            handover,
            out,
            registered_name=config["publish"],
            experiment=config["registry"]["experiment"],
            champion_images=config["registry"]["champion_images"],
        )
        console.print(f"registered: {line}", markup=False, soft_wrap=True)
