"""Group-relative advantage."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def grpo(rewards: npt.NDArray[np.float64], *, scale_by_std: bool, eps: float) -> npt.NDArray[np.float64]:
    """Advantage of each sample of one group, [n], from rewards [n] in which NaN means "not known".

    A_i = (r_i - mean) / (std + eps), mean and standard deviation over the known rewards, n - 1 in the denominator of
    the variance (Shao et al. 2024, section 4.1); without `scale_by_std`, A_i = r_i - mean (Dr. GRPO, Liu et al. 2025).

    A sample of unknown reward gets 0 and is left out of mean and deviation. If the known rewards are all equal, every
    advantage is exactly 0, rounding of the mean notwithstanding; so is that of a sample without company.

    >>> grpo(np.array([1.0, 0.0, 0.0, 0.0]), scale_by_std=False, eps=1e-6).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    known = ~np.isnan(rewards)
    values = rewards[known]
    advantages = np.zeros(len(rewards))
    if len(values) == 0 or values.max() == values.min():
        return advantages
    centred = values - values.mean()
    advantages[known] = centred / (values.std(ddof=1) + eps) if scale_by_std else centred
    return advantages
