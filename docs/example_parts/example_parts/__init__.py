"""Parts for ds_distill: a loss term, a routing policy, a metric and a phase."""
