"""What people read of an evaluation: the card in the terminal and as Markdown."""

from hardsphere.report.card import card_markdown as card_markdown
from hardsphere.report.card import card_view as card_view
from hardsphere.report.card import show_card as show_card
