"""From candidates to records: blinded ranking tasks in Argilla, every annotator's verdict kept, agreement, adjudication, export."""
