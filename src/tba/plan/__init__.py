"""`tba plan`: what a run will do with N searchers, from a short measurement of its parts.

a run's settings --measure.py--> profile.py: costs, responses (a JSON file)
                 --simulation.py--> steps/s, idle shares, staleness, traffic for each N
                 --planning.py--> how many searchers are enough --report.py--> tables
"""
