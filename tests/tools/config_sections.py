"""The section of every command's keys, by the name of its configuration."""

from certify.evaluation.cli import Keys as EvaluateKeys
from certify.leaderboard.cli import CheckKeys, SubmitKeys
from certify.papers.cli import AnalyseKeys, FeaturesKeys
from certify.photos.cli import ImageKeys, ServeKeys
from certify.stage.cli import Keys as CertifyKeys
from certizoo.config.schema import Section
from trainers.job.keys import TrainerKeys

SECTIONS: dict[str, type[Section]] = {
    "adv_train": TrainerKeys, "std_train": TrainerKeys, "constrain": TrainerKeys, "certify": CertifyKeys,
    "evaluate": EvaluateKeys, "analyse": AnalyseKeys, "features": FeaturesKeys, "image": ImageKeys,
    "serve": ServeKeys, "submit": SubmitKeys, "check": CheckKeys,
}  # fmt: skip
