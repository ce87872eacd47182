"""What a run should cost, from formulas alone.

Standard library only: importing this wing never imports torch. One module a subject:
`communication` (bytes on the wire).

    from playbook_utils.predict.communication import wire_bytes
"""
