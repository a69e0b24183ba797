"""The schema of the leaderboard and one of our entries."""

import json

from benchmarks import leaderboard

SCHEMA = json.loads((leaderboard.LEADERBOARD / "schema.json").read_text())
OURS = json.loads((leaderboard.LEADERBOARD / "cert_vit_c10.json").read_text())
