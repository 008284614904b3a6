"""What a run has found, for people: verdict, tables, report.html, the student's model card.

Begin with `report`, which renders report.html of results.json; `verdict` says it in one sentence.
"""
