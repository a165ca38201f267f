"""stub"""
def check_spec(spec):
    return ()
