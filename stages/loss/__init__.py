"""Losses of a policy update: pure functions on the flat tokens of one micro-batch.

    ppo_clip       clipped policy loss of each token
    kl             divergence from the reference, of each token
    correction     weight of each token that another policy drew; `correction_settings` holds its settings
    mismatch       how far that policy is from the one that is trained
    aggregate      weight of each token, so that the loss of a step is the sum of weight * loss over its micro-batches

The names that settings may hold stand here, so that they can be checked without loading torch.
"""

from __future__ import annotations

#: KL estimators; `kl.kl_loss` says what each one's gradient is. Recommended: "k3+".
KL_KINDS: tuple[str, ...] = ("k1", "k2", "k3", "k1+", "k3+")

#: Ways to sum the tokens' losses into one; `aggregate.token_weights` gives the formulas.
AGGREGATIONS: tuple[str, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
