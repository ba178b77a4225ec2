"""What a request may say, field by field, in every dialect that the server speaks: one table, which checks requests
before they are scheduled, and from which `docs/fields.md` is made.

A field is honoured, refused with 400, without effect on the sample, or accepted and named as ignored. Nothing that
changes a sample is ignored in silence.
"""
