"""Widgets of the course: pure-Python controllers, and one view that shows any of them.

``from labkit.widgets import base`` never imports ipywidgets; ``base.show`` does, when called.
"""
