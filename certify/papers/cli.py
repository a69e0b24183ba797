"""The commands that draw the figures of the papers.

python -m certify analyse handover=DIR ...                      inside one model; keys of configs/analyse.yaml
python -m certify features handover=DIR [against=DIR2] ...      under attack; keys of configs/features.yaml
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import zoo
from certify.papers import analysis, feature_figures, feature_report
from certify.rows.arguments import Config, Subject, data_of, handover_of, out_of, settings_of
from certizoo.config.schema import PathText, typed_values
from certizoo.progress import progress_bar


@dataclass(frozen=True)
class AnalyseKeys(Subject, analysis.Settings):
    """configs/analyse.yaml."""


@dataclass(frozen=True)
class FeaturesKeys(Subject, feature_report.Settings):
    """configs/features.yaml."""

    against: PathText | None = None


def analyse(config: Config) -> None:
    """Compute Jacobians of the blocks and bounds of the first attention of one hand-over.

    Prints Table 3 of LoFAST.
    """
    config = typed_values(AnalyseKeys, config)
    handover = handover_of(config)
    out = out_of(config, handover, "certificate")
    data = data_of(config, handover)
    settings = settings_of(analysis.Settings, config)
    console = Console(highlight=False, markup=False)
    with progress_bar("analysing", console) as progress:
        table = analysis.run(handover, data, settings, out, progress)
    console.print("largest change of X + F(X) at the first attention, mean over the images", soft_wrap=True)
    console.print(analysis.text(table), markup=False, soft_wrap=True)
    console.print(f"figures and tables in {out / analysis.FOLDER}", soft_wrap=True)


def features(config: Config) -> None:
    """Compare the clean and attacked features of one hand-over, or of two on the same images."""
    config = typed_values(FeaturesKeys, config)
    handover = handover_of(config)
    out = out_of(config, handover, "features")
    against = zoo.handover.folder_of(Path(config["against"])) if config["against"] else None
    data = data_of(config, handover)
    settings = settings_of(feature_report.Settings, config)
    console = Console(highlight=False, markup=False)
    with progress_bar("attacking", console) as progress:
        summary = feature_report.run(handover, against, data, settings, out, progress)
    console.print(feature_figures.closing_table(summary))
    console.print(summary["note"], soft_wrap=True)
    console.print(f"figures and tables in {out}", soft_wrap=True)
