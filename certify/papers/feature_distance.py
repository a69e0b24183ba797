"""How far apart two samples of features are: the proxy A-distance, and both in one plane. By
scikit-learn, which only this file of the package imports.

    d_A = 2 (1 - 2 err),     err = error on held-out images of a linear classifier that tells clean from attacked

(Ben-David et al. 2006, 2010.) 0: it cannot tell, 2: it always can. An estimate: the distance itself has the best linear
classifier, of all images of their kind, where this has one that logistic regression found on some of them.

Letters: N images, D width of the features.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from certify.rows.intervals import wilson

FOLDS = 5
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Distance:
    """`error` is that of the classifiers on the images they did not see. The interval of 95 % knows of the choice of
    these images, not of that of the ones to learn from; it counts an image and its attacked version as one trial."""

    error: float
    images: int

    @property
    def value(self) -> float:
        return from_error(self.error)

    @property
    def interval(self) -> tuple[float, float]:
        low, high = wilson(self.error, self.images)
        return from_error(high), from_error(low)


def from_error(error: float) -> float:
    """d_A in [0, 2]: a classifier that is wrong more often than right was found by chance."""
    return 2 * (1 - 2 * min(max(error, 0.0), 0.5))


def a_distance(clean_ND: Array, attacked_ND: Array, seed: int = 0) -> Distance:
    """d_A of the features of the same N images, row by row, clean and attacked; N at least `FOLDS`.

    Every image is held out once, in FOLDS folds; its two versions are always on the same side, so that nothing of an
    image is learned. Features are standardised by those learned from. Does not depend on the order of the images.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    order = _own_order(np.hstack([clean_ND, attacked_ND]), seed)
    images = len(order)
    features = np.vstack([clean_ND[order], attacked_ND[order]])
    attacked = np.repeat([0, 1], images)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    answers = cross_val_predict(
        classifier, features, attacked, groups=np.tile(np.arange(images), 2), cv=GroupKFold(FOLDS)
    )
    return Distance(error=float((answers != attacked).mean()), images=images)


def _own_order(pairs_NF: Array, seed: int) -> NDArray[np.intp]:
    """Sorted by what the images are, then shuffled: whatever order they came in, they meet the same fold."""
    return np.lexsort(pairs_NF.T)[np.random.default_rng(seed).permutation(len(pairs_NF))]


def plane(clean_ND: Array, attacked_ND: Array, perplexity: float, seed: int = 0) -> Array:
    """t-SNE (van der Maaten and Hinton 2008) of all 2N features together, the clean ones first: (2N, 2).

    Starts from the first two principal components. Only who is near whom means something, no distance or size does.
    """
    from sklearn.manifold import TSNE

    features = np.vstack([clean_ND, attacked_ND])
    return np.asarray(TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(features), dtype=float)
