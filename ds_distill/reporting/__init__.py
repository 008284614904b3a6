"""Results, report, model card."""
