"""stub"""
def validate(node, *, definition=None):
    return ()
