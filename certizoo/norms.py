"""Names of the norms in which a ball of images is measured, over all channels and pixels of an image."""

L2, LINF = "l2", "linf"
NAMES = {L2: "L2", LINF: "Linf"}  # in tables, and in AutoAttack and RobustBench
