"""Settings that all tests share."""

from hypothesis import HealthCheck, settings

# A loaded machine is slow, which says nothing about the property under test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
