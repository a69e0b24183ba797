"""The models of the zoo that the adjoint certificate covers, and a few of them for quick tests."""

from tests.tools.small_models import distinct
from zoo.models.factory import model_options

REFUSED: dict[str, str] = {}  # models that the certificate does not cover, and why
MODELS = distinct()
COVERED = [name for name in MODELS if name not in REFUSED]


def attention(name: str) -> str:
    """Return the kind of attention, "None" for a model without one."""
    kind = model_options(name).get("attention")
    return str(kind["name"] if isinstance(kind, dict) else kind)


EACH_ATTENTION = {attention(name): name for name in reversed(COVERED)}
QUICK = (*EACH_ATTENTION.values(), "lofast_vit_c10", "lofast_vit_c10_smooth")
