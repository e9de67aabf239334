from hypothesis import settings

# shared cores: a slow example says nothing about the code
settings.register_profile("autotune", deadline=None, derandomize=True)
settings.load_profile("autotune")
