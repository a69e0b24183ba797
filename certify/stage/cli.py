"""The command `python -m certify handover=DIR [data=NAME data.root=FOLDER] [eps=[...]] ...`.

Its keys are those of configs/certify.yaml and configs/certify/stage.yaml.
"""

from dataclasses import fields

from rich.console import Console

from certify.rows.arguments import (
    Config,
    attack_of,
    data_of,
    handover_of,
    out_of,
    refuse_other_types,
    settings_of,
    share_of,
)
from certify.rows.progress import progress_bar
from certify.stage import register, run, tables
from certify.stage.settings import Settings
from certizoo import UserError
from certizoo.registry import champion


def certify(config: Config) -> None:
    """Certify one hand-over, print its table and the paths of the results, and publish it if asked to."""
    champion.refuse_given(config["registry"]["champion_images"])
    handover = handover_of(config)
    out = out_of(config, handover, "certificate")
    data = data_of(config, handover)
    refuse_other_types(Settings, config, *(field.name for field in fields(Settings) if field.name != "attack"))
    share = share_of(config)
    if share.first and config["publish"]:
        raise UserError(f"first={share.first}: a certificate of a range is not published; join the ranges with parts=")
    eps = None if config["eps"] is None else tuple(config["eps"])
    settings = settings_of(Settings, config, eps=eps, attack=attack_of(config))
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
