r"""Variational continual learning (Nguyen, Li, Bui and Turner, ICLR 2018) with mean-field Gaussian weights.

The knowledge of the weights is a distribution, and the posterior after one task is the prior of the next:

.. math::

    q_t(\theta) &= \arg\min_q \mathrm{KL}\big( q(\theta) \,\big\|\, q_{t-1}(\theta)\, p(\mathcal D_t|\theta) / Z_t \big)

    q_t(\theta) &= \prod_d \mathcal N(\theta_d;\, \mu_d, \sigma_d^2)

That is to minimize, over the N examples of the task and divided by N,

.. math::

    -\tfrac{1}{N} \mathrm{ELBO} = \mathrm E_{q_t}\Big[ -\tfrac{1}{N} \sum_n \log p(y_n | \theta, x_n) \Big]
        + \tfrac{1}{N} \mathrm{KL}(q_t \| q_{t-1})

Sampling estimates the expectation. A layer's pre-activation h = Wx + b is Gaussian under q, so the layers sample h
instead of the weights (local reparameterization, Kingma et al. 2015), which gives gradients of far smaller variance:

.. math:: \mathrm E[h] = \mu_W x + \mu_b, \qquad \mathrm{Var}[h] = \sigma_W^2 x^2 + \sigma_b^2

How to use it: call ``model = convert(net)`` once; for each task, minimize :func:`negative_elbo`, then call
:func:`update_prior`; answer with :func:`predict`. All memory is in parameters and buffers, so ``state_dict`` saves it.
The layers are in :mod:`alasso.vcl.layers`, coresets in :mod:`alasso.vcl.coresets`.
"""

from alasso.vcl.layers import convert
from alasso.vcl.objective import evaluating, expected_loss, kl, kl_gaussians, negative_elbo, predict, update_prior

__all__ = ["convert", "evaluating", "expected_loss", "kl", "kl_gaussians", "negative_elbo", "predict", "update_prior"]
