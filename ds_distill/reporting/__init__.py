"""Reports: verdict, tables, report.html, model card."""
