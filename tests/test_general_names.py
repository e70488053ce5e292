"""The list `general`: names of things that a photograph may show."""

import re
from importlib.resources import files

from protodcs.data import prompts
from protodcs.data.prompts import class_names

NAMES = class_names("general")

MUST_BE_IN_THE_LIST = {
    "Furniture and fittings": ["armchair", "bed", "dining table", "door", "mirror"],
    "Household objects": ["broom", "candle", "scissors", "toothbrush", "umbrella"],
    "Kitchen and tableware": ["fork", "frying pan", "refrigerator", "teapot", "wine glass"],
    "Clothing and accessories": ["backpack", "hat", "jeans", "shoe", "sunglasses"],
    "Electronics and computing": ["computer mouse", "laptop", "remote control", "smartphone", "television"],
    "Office and school supplies": ["ballpoint pen", "envelope", "paper clip", "stapler"],
    "Tools and industry": ["conveyor belt", "hammer", "lathe", "screwdriver", "wrench"],
    "Toys and play equipment": ["doll", "jigsaw puzzle", "teddy bear", "toy car"],
    "Musical instruments": ["acoustic guitar", "drum", "piano", "trumpet", "violin"],
    "Weapons and military equipment": ["grenade", "handgun", "knife", "rifle", "sword"],
    "Vehicles and transport": ["airplane", "bicycle", "car", "sailboat", "truck"],
    "Buildings and structures": ["bridge", "church", "fence", "house", "skyscraper"],
    "Indoor places": ["bathroom", "kitchen", "office", "supermarket", "warehouse"],
    "Outdoor places": ["city street", "forest path", "parking lot", "playground", "vineyard"],
    "Landscapes, sky and weather": ["desert", "fog", "lightning", "mountain", "sunset"],
    "Textures and materials": ["leather", "marble", "rust", "striped pattern", "woven fabric"],
    "Food and dishes": ["bread", "hamburger", "pizza", "soup", "sushi"],
    "Drinks": ["beer", "coffee", "milk", "orange juice"],
    "Fruit, vegetables, nuts and spices": ["apple", "banana", "carrot", "potato", "tomato"],
    "Trees, shrubs and other plants": ["cactus", "fern", "moss", "oak tree", "palm tree"],
    "Flowers": ["daffodil", "orchid", "rose", "sunflower", "tulip"],
    "Fungi": ["fly agaric", "mushroom", "puffball"],
    "Mammals": ["cat", "dog", "elephant", "horse", "kangaroo", "red fox", "wild boar"],
    "Dog and cat breeds": ["German shepherd dog", "golden retriever", "poodle", "Siamese cat"],
    "Farm animals": ["chicken", "dairy cow", "rooster", "stallion"],
    "Birds": ["bald eagle", "crane bird", "ostrich", "pigeon", "sparrow"],
    "Reptiles and amphibians": ["crocodile", "frog", "lizard", "rattlesnake", "tortoise"],
    "Fish and other sea life": ["crab", "goldfish", "jellyfish", "octopus", "shark"],
    "Insects, spiders and other small animals": ["ant", "butterfly", "earthworm", "snail", "spider"],
    "Animal signs and prehistoric animals": ["animal footprint", "antler", "dinosaur"],
    "People": ["baby", "crowd", "firefighter", "person", "teenager"],
    "Activities": ["cooking", "sleeping", "swimming", "welding"],
    "Body parts": ["ear", "eye", "foot", "hand"],
    "Documents, screens and printed matter": ["map", "newspaper", "receipt", "screenshot"],
    "Art and drawings": ["cartoon", "graffiti", "oil painting", "pencil drawing", "statue"],
    "Sports and games": ["baseball bat", "chess", "soccer ball", "tennis racket"],
    "Symbols, signs and signals": ["flag", "no smoking sign", "stop sign", "warning sign"],
    "Medical and scientific objects and images": ["microscope", "MRI scan", "syringe", "x-ray"],
    "Camera and image effects": ["blurry photo", "night vision image", "overexposed photo"],
    "Defects, waste and damage": ["broken glass", "garbage pile", "weld seam"],
    "Celebration and decoration": ["confetti", "garland", "gift"],
}

# A text encoder cannot tell which of several things these mean.
AMBIGUOUS = {"bat", "crane", "file", "iris", "jaguar", "match", "mouse", "nail", "palm", "python", "ring", "seal"}
# No photograph shows these.
ABSTRACT = {"beauty", "democracy", "freedom", "idea", "justice", "love", "music", "news", "peace", "time"}
# No name has one of these words.
BRANDS = {"frisbee", "jacuzzi", "jeep", "lego", "rollerblade", "taser", "tupperware", "velcro", "zamboni"}
EVENTS_AND_POLITICS = {"election", "halloween", "olympics", "politician", "president", "protest", "swastika"}
OFFENSIVE = {"cripple", "erotic", "genitals", "gypsy", "lingerie", "nude", "porn", "sex", "sexy", "slave", "stripper"}


def sections():
    """Return the names of each section by its heading."""
    text = (files(prompts) / "general.names.txt").read_text(encoding="utf-8")
    parts = re.split(r"^# (.+)\n", text.split("\n\n", 1)[1], flags=re.MULTILINE)[1:]
    return {heading: names.split("\n") for heading, names in zip(parts[::2], map(str.strip, parts[1::2]), strict=True)}


def plurals(name):
    return {
        f"{name}s",
        f"{name}es",
        re.sub("y$", "ies", name),
        re.sub("fe?$", "ves", name),
        re.sub("man$", "men", name),
    }


def test_the_list_has_2000_to_5000_names():
    assert 2000 <= len(NAMES) <= 5000


def test_no_name_is_there_twice_in_upper_and_lower_case_or_with_another_hyphen():
    assert len({re.sub("[- ]", "", name.lower()) for name in NAMES}) == len(NAMES)


def test_no_name_is_there_in_singular_and_plural():
    names = {name.lower() for name in NAMES}
    assert {name: both for name in names if (both := (plurals(name) - {name}) & names)} == {}


def test_each_name_has_at_most_four_words_of_plain_letters():
    assert [name for name in NAMES if not re.fullmatch(r"[A-Za-z0-9'-]+( [A-Za-z0-9'-]+){0,3}", name)] == []


def test_the_names_of_each_section_are_sorted():
    for names in sections().values():
        assert names == sorted(names, key=str.lower)


def test_every_section_has_the_names_that_everyone_expects():
    assert MUST_BE_IN_THE_LIST.keys() == sections().keys()
    missing = {kind: set(names) - set(sections()[kind]) for kind, names in MUST_BE_IN_THE_LIST.items()}
    assert {kind: names for kind, names in missing.items() if names} == {}


def test_no_section_has_more_than_a_tenth_of_the_names():
    assert max(map(len, sections().values())) < len(NAMES) / 10


def test_no_name_is_ambiguous_or_abstract():
    assert {name.lower() for name in NAMES} & (AMBIGUOUS | ABSTRACT) == set()


def test_no_name_has_a_word_of_brands_events_politics_or_offence():
    words = {word for name in NAMES for word in re.split("[ -]", name.lower())}
    assert words & (BRANDS | EVENTS_AND_POLITICS | OFFENSIVE) == set()
