"""Word pools that the curriculum draws from."""

from random import Random

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Karen Leo Maria Nina Oscar Paula Quinn "
    "Rosa Simon Tara Ursula Victor Wendy Xavier Yara Zoe Adam Bella Carl Diana Eric Fiona George "
    "Helen Ivan Julia Kevin Laura Mark Nora Oliver Peter Rachel Sam Tina Vera Walter Alice Bruno "
    "Cora Daniel Eva Frank Gina Henry Ines James Kate Lucas Mia Noah Olga Paul Rita Steve Theo "
    "Uma Vince Will Amy Boris Chloe Derek Ella Fred Gloria Harry Isabel John Kim Lily Max Nick"
).split()
CITIES = (
    "Paris London Rome Madrid Berlin Vienna Oslo Lisbon Dublin Athens Prague Warsaw Cairo Tokyo "
    "Delhi Lima Boston Chicago Seattle Denver Toronto Sydney Geneva Milan Porto Seville Munich "
    "Hamburg Zurich Krakow Helsinki Stockholm Copenhagen Brussels Budapest Nairobi Bangkok Seoul"
).split()
COLOURS = (
    "red blue green yellow orange purple pink brown black white grey silver gold violet"
).split()
JOBS = (
    "doctor teacher baker farmer pilot nurse lawyer painter driver cook singer writer engineer "
    "sailor plumber judge dentist gardener actor tailor"
).split()
ANIMALS = (
    "dog cat horse rabbit parrot turtle hamster goat sheep duck fish snake lizard pony mouse owl "
    "fox bear wolf lion tiger zebra monkey frog eagle whale shark spider camel donkey"
).split()
FOODS = (
    "apple banana cherry lemon orange grape melon peach pear plum mango bread cheese butter rice "
    "soup pasta pizza salad cake honey sugar pepper onion carrot potato tomato garlic bean corn"
).split()
THINGS = (
    "table chair lamp book pen paper clock phone radio camera guitar piano drum bottle cup plate "
    "spoon knife fork box bag coat shirt shoe hat glove ring key lock door window mirror carpet "
    "pillow blanket candle basket bucket ladder hammer nail rope wheel bicycle car truck boat "
    "train engine bridge tower castle garden river mountain forest island desert valley ocean "
    "beach cloud storm thunder rain snow wind star moon planet rocket robot laptop keyboard "
    "screen printer pencil ruler eraser letter stamp ticket wallet coin medal flag map compass"
).split()
ADJECTIVES = (
    "big small old new fast slow happy sad cold warm bright dark quiet loud soft hard clean dirty "
    "heavy light long short young strong weak brave calm gentle kind proud silent tall tiny wild"
).split()
VERBS = (
    "walk run jump sing dance read write draw paint cook bake swim climb drive fly sleep dream "
    "laugh smile talk listen watch build break carry push pull throw catch open close find lose"
).split()
LINKS = "the a and with under over near from to in on of by for at".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
LANGUAGES = "French German Spanish Italian Greek Polish Dutch Swedish Danish Turkish".split()
CURRENCIES = "USD EUR GBP JPY CHF SEK NOK CAD AUD INR".split()
CAPITALS = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Spain": "Madrid",
    "Germany": "Berlin", "Austria": "Vienna", "Norway": "Oslo", "Portugal": "Lisbon",
    "Ireland": "Dublin", "Greece": "Athens", "Poland": "Warsaw", "Egypt": "Cairo",
    "Japan": "Tokyo", "India": "Delhi", "Peru": "Lima", "Finland": "Helsinki",
    "Sweden": "Stockholm", "Denmark": "Copenhagen", "Belgium": "Brussels",
    "Hungary": "Budapest", "Kenya": "Nairobi", "Thailand": "Bangkok",
}  # fmt: skip
PLAIN = ANIMALS + FOODS + THINGS + ADJECTIVES + VERBS + COLOURS + JOBS
EVERYTHING = PLAIN + NAMES + CITIES + LINKS + DAYS + MONTHS
ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl qu sh st th tr y x".split()
ENDS = ["", "", "", *"n r s t l m x ck nd rt st ng".split()]


def invented(rng: Random) -> str:
    """A word that nobody knows, of one to four syllables; now and then with capitals."""
    syllables = rng.choice((1, 2, 2, 3, 3, 4))
    word = "".join(
        rng.choice(ONSETS) + rng.choice("aeiou") + rng.choice(ENDS) for _ in range(syllables)
    )
    return rng.choice((word, word, word.capitalize(), word.upper()))
