"""Chi-squared: how far counts lie from what was expected of them."""

import numpy as np


def chi_squared(counts, expected) -> float:
    """Returns chi-squared as a multiple of its 99.9 % quantile: below 1 where the counts are as expected.

    Cells of which less than 5 are expected are joined."""
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty
    return ((observed - wanted) ** 2 / wanted).sum() / quantile
