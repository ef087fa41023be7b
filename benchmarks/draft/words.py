"""Words that the prompt templates are filled with."""


def split(text: str) -> list[str]:
    """Returns what semicolons separate, without line breaks."""
    return [" ".join(part.split()) for part in text.split(";")]


SCIENCE = """
photosynthesis; gravity; magnetism; volcanoes; earthquakes; tides and the moon; black holes; the
water cycle; DNA; vaccines; antibiotics; evolution; the immune system; the solar system; comets;
rainbows; lightning; sound waves; the speed of light; friction; density; atoms; chemical bonds;
acids and bases; batteries; electric motors; semiconductors; lasers; radio waves; nuclear
fusion; wind turbines; solar panels; glaciers; coral reefs; rain forests; deserts; soil; bees
and pollination; bird migration; hibernation; camouflage; the human heart; digestion; sleep and
dreams; memory; the eye; hearing; muscles; bones; vitamins; yeast and bread; fermentation; rust;
crystals; the ozone layer; climate change; ocean currents; fossils; dinosaurs; plate tectonics;
probability; prime numbers; fractions; the Pythagorean theorem; algebra; statistics; infinity;
compound interest
"""

TECHNOLOGY = """
computer memory; operating systems; compilers; databases; search engines; web browsers;
encryption; passwords; machine learning; neural networks; recursion; sorting algorithms; linked
lists; hash tables; binary search; unit tests; version control; cloud computing; wireless
networks; email; satellites; GPS; digital cameras; touch screens; 3D printing; robots; drones;
electric cars; bicycles; trains; elevators; refrigerators; microwave ovens; sewing machines;
clocks; bridges; tunnels; dams; paper; printing; glass; concrete; steel; plastic; telescopes;
microscopes; submarines; balloons
"""

SOCIETY = """
democracy; elections; the Roman Empire; the Silk Road; the Renaissance; the Industrial
Revolution; ancient Egypt; ancient Greece; the Vikings; castles; the printing press; explorers
of the seas; world trade; inflation; taxes; insurance; supply and demand; stock markets; saving
money; small businesses; teamwork; leadership; public speaking; job interviews; remote work;
time management; stress; friendship; honesty; patience; curiosity; creativity; good manners;
recycling; public transport; city parks; libraries; museums; newspapers; advertising; tourism;
farming; fishing; architecture; human rights; the United Nations; the Olympic Games;
immigration; languages; alphabets
"""

HOBBIES = """
gardening; cooking; baking bread; chess; football; basketball; tennis; swimming; running;
hiking; camping; cycling; yoga; photography; painting; drawing; pottery; knitting; origami;
playing the guitar; playing the piano; singing; jazz; opera; ballet; theatre; films; poetry;
novels; keeping a diary; bird watching; astronomy; stamp collecting; model ships; woodworking;
board games; puzzles; dogs; cats; horses; aquarium fish; tea; coffee; chocolate; cheese; pasta;
soup; salads; apples; picnics; birthdays; weddings; road trips; beaches; mountains; islands;
markets; winter; spring
"""

TOPICS = [
    " ".join(topic.split())
    for group in (SCIENCE, TECHNOLOGY, SOCIETY, HOBBIES)
    for topic in group.split(";")
]

FIRST_NAMES = """
Ada Ben Clara David Elena Farid Grace Hiro Ines Jonas Kofi Leila Mateo Nora Omar Paula Quentin
Rosa Samir Tara Ulrich Vera Wanda Xavier Yuki Zoe Anton Bella Carlos Dina Emil Fatima Gustav
Hanna Ivan Julia Karl Lucia Marco Nadia Olga Pedro Rita Simon Tomas Uma Victor Wendy Amir Chen
""".split()

LAST_NAMES = """
Abbott Becker Castillo Dubois Eriksen Fischer Garcia Haddad Ivanova Jensen Kowalski Lopez Moreau
Nakamura Okafor Petrov Quinn Rossi Santos Tanaka Usman Vargas Weber Yilmaz Zhang Brooks Carter
Dawson Ellis Foster Grant Hughes Keller Larsen Mendes Novotny
""".split()

PLACES = split("""
Lisbon; Kyoto; Nairobi; Montreal; Oslo; Cairo; Lima; Prague; Sydney; Dublin; Hanoi; Warsaw;
Mumbai; Boston; Athens; Vienna; Bogota; Helsinki; Seoul; Casablanca; a village by the sea; a
small mountain town; a quiet suburb; an old harbour; a desert oasis; a busy train station; a
forest cabin; a research station at the South Pole; a floating market; a castle on a hill
""")

JOBS = split("""
teacher; nurse; carpenter; pilot; baker; farmer; librarian; engineer; firefighter; gardener;
doctor; dentist; lawyer; musician; painter; sailor; cook; tailor; plumber; electrician;
journalist; photographer; scientist; shop owner; bus driver; postman; vet; architect;
translator; detective
""")

CHARACTERS = split("""
a shy dragon; an old clockmaker; a lost puppy; a brave mouse; a talking tree; a young inventor;
a tired king; a curious octopus; a ghost who is afraid of the dark; twin sisters; a retired
pirate; a boy who collects clouds; a girl who can speak with birds; a lazy wizard; an honest
thief; a snowman in summer; a lonely whale; a travelling baker; a cat that runs a hotel; a
knight without a horse; a fox and a hen; a violin that plays by itself; an astronaut on her
first trip; a grandmother with a secret; a postman in the mountains; a painter who sees no
colours; two rival cooks; a river
""")

EVENTS = split("""
finds a map in an old book; must cross a dark forest; opens a tiny shop; learns to swim; hears a
strange noise at night; gets a letter without a sender; loses something precious; makes an
unlikely friend; wins a race by accident; repairs a broken bridge; misses the last train; finds
a hidden door; plans a surprise; has to tell the truth; meets an old enemy; saves a village from
a flood; wakes up in another century; plants a magic seed; enters a cooking contest; keeps a
promise; forgets a name
""")

ITEMS = split("""
pens; notebooks; apples; oranges; lamps; chairs; tables; shirts; books; cups; plates; tickets;
bottles of water; bags of rice; boxes of screws; bicycles; keyboards; candles; blankets; maps;
eggs; jars of honey; flowers; towels; umbrellas; batteries; kites; clocks; mirrors; hammers
""")

COMPANY = """
Northwind; Bluebird; Redstone; Silverline; Maple; Harbour; Sunrise; Granite; Willow; Falcon;
Evergreen; Copper; Lantern; Meadow; Summit
""".replace("\n", " ")
COMPANIES = [
    f"{name.strip()} {kind}"
    for name in COMPANY.split(";")
    for kind in (
        "Foods",
        "Travel",
        "Books",
        "Tools",
        "Software",
        "Bakery",
        "Clinic",
        "Garden Centre",
    )
]

LANGUAGES = ["French", "Spanish", "German", "Italian", "Portuguese"]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """
January February March April May June July August September October November December
""".split()

CODE_TASKS = split("""
reverses a string; counts the vowels in a text; returns the largest number of a list; sorts a
list of dictionaries by a key; removes duplicates from a list; checks whether a word is a
palindrome; computes the factorial of n; returns the n-th Fibonacci number; merges two sorted
lists; reads a CSV file and sums one column; counts how often each word appears; flattens a
nested list; converts Celsius to Fahrenheit; finds the common elements of two lists; checks
whether a year is a leap year; computes the average of a list of numbers; rotates a list by k
places; validates an email address; finds the longest word of a sentence; converts a number to
binary; computes the greatest common divisor of two numbers; checks whether brackets are
balanced; groups names by their first letter; transposes a matrix; formats seconds as hours and
minutes; generates a random password; searches a sorted list; splits a list into chunks;
computes compound interest; draws a triangle of stars; parses a date; counts the lines of a
file; capitalises each word; removes punctuation; multiplies two matrices
""")

SNIPPETS = [
    "def {f}({a}, {b}):\n    result = []\n    for x in {a}:\n        if x > {b}:\n"
    "            result.append(x * {n})\n    return result",
    "def {f}({a}):\n    total = 0\n    for value in {a}:\n        total += value\n"
    "    return total / len({a})",
    "class {c}:\n    def __init__(self, {a}, {b}):\n        self.{a} = {a}\n"
    "        self.{b} = {b}\n\n"
    "    def {f}(self):\n        return self.{a} + self.{b} * {n}",
    "def {f}({a}):\n    counts = {{}}\n    for item in {a}:\n"
    "        counts[item] = counts.get(item, 0) + 1\n    return counts",
    "def {f}({a}, {b}={n}):\n    if {a} is None:\n        return {b}\n    while {a} < {b}:\n"
    "        {a} = {a} * 2\n    return {a}",
    "import json\n\ndef {f}(path):\n    with open(path) as file:\n        {a} = json.load(file)\n"
    '    return [{b}["name"] for {b} in {a} if {b}["size"] > {n}]',
    "function {f}({a}, {b}) {{\n  let out = 0;\n  for (let i = 0; i < {a}.length; i++) {{\n"
    "    out += {a}[i] * {b};\n  }}\n  return out + {n};\n}}",
    "def {f}({a}):\n    words = {a}.split()\n    longest = words[0]\n    for word in words:\n"
    "        if len(word) > len(longest):\n            longest = word\n    return longest",
]
IDENTIFIERS = """
values limit numbers rows items factor prices names width height users scores lines text entries
points weights records amount rate parts orders tokens nodes
""".split()
FUNCTIONS = """
select_large mean_value combine count_items grow load_names weighted_sum find_longest process
compute_result update_all check_values transform collect
""".split()
CLASSES = "Account Box Player Shape Sensor Invoice Robot Recipe Ticket Planet".split()
