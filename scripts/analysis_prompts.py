# ruff: noqa: E501 (prompts stand as they are typed)
"""Hand-written prompts and templates for training the query analysis; public data sets have no such short requests.

Lists that end in `_HELD` are kept for evaluation only and share no template with the training lists.
"""

from __future__ import annotations

CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Egypt": "Cairo",
    "Canada": "Ottawa", "Cuba": "Havana", "Poland": "Warsaw", "Iraq": "Baghdad", "Chile": "Santiago",
    "Austria": "Vienna", "Greece": "Athens", "Portugal": "Lisbon", "Hungary": "Budapest", "Ireland": "Dublin",
    "Thailand": "Bangkok", "Finland": "Helsinki", "Denmark": "Copenhagen", "Iran": "Tehran", "Italy": "Rome",
    "Spain": "Madrid", "Germany": "Berlin", "Russia": "Moscow", "Ghana": "Accra", "Nepal": "Kathmandu",
}  # fmt: skip
AUTHORS = {
    "Hamlet": "William Shakespeare", "Pride and Prejudice": "Jane Austen", "1984": "George Orwell",
    "War and Peace": "Leo Tolstoy", "Moby-Dick": "Herman Melville", "Don Quixote": "Miguel de Cervantes",
    "The Odyssey": "Homer", "Great Expectations": "Charles Dickens", "The Hobbit": "J. R. R. Tolkien",
    "Frankenstein": "Mary Shelley", "The Trial": "Franz Kafka", "Ulysses": "James Joyce",
}  # fmt: skip
SYMBOLS = {
    "gold": "Au", "iron": "Fe", "silver": "Ag", "sodium": "Na", "potassium": "K", "lead": "Pb", "tin": "Sn",
    "copper": "Cu", "helium": "He", "carbon": "C",
}  # fmt: skip
YEARS = {
    "World War II end": "1945", "the Berlin Wall fall": "1989", "the Titanic sink": "1912",
    "the French Revolution begin": "1789", "World War I start": "1914", "the Apollo 11 landing take place": "1969",
}  # fmt: skip
FACTS_HELD = [
    ("Which planet is the largest in the solar system?", "Jupiter is the largest planet in the solar system."),
    ("How tall is Mount Everest?", "Mount Everest is 8,849 metres tall."),
    ("What currency is used in Mexico?", "The currency used in Mexico is the peso."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa."),
    ("Where is the Great Barrier Reef?", "The Great Barrier Reef is off the coast of Queensland, Australia."),
    ("What language do people speak in Brazil?", "People in Brazil speak Portuguese."),
    ("Who discovered penicillin?", "Alexander Fleming discovered penicillin."),
    ("What is the boiling point of water?", "Water boils at 100 degrees Celsius."),
    ("How many continents are there?", "There are seven continents."),
    ("Which river flows through London?", "The River Thames flows through London."),
    ("Is the Earth flat?", "No, the Earth is round."),
    ("What gas do plants absorb?", "Plants absorb carbon dioxide."),
    ("Who was the first president of the United States?", "George Washington was the first president."),
    ("What is the freezing point of water in Fahrenheit?", "Water freezes at 32 degrees Fahrenheit."),
    ("Name the longest bone in the human body.", "The femur is the longest bone in the human body."),
    ("Which ocean lies between Africa and Australia?", "The Indian Ocean lies between Africa and Australia."),
]

EXPLAIN = [
    "Explain how {} works.", "Why is {} important?", "Describe {} in detail.", "What are the main causes of {}?",
    "Write an essay about {}.", "What is {}?", "How does {} affect everyday life?", "Compare {} with its alternatives.",
]  # fmt: skip
EXPLAIN_HELD = ["Tell me everything about {}.", "What should a beginner know about {}?", "Can you explain {} to me?"]
TOPICS = [
    "photosynthesis", "inflation", "the water cycle", "machine learning", "the immune system", "plate tectonics",
    "democracy", "blockchain", "the greenhouse effect", "jet lag", "vaccination", "the stock market", "gravity",
    "deforestation", "sleep", "music theory", "recycling", "nuclear power", "urban planning", "bread baking",
]  # fmt: skip

DIALOGUE = [
    "Hi! How are you today?", "Hello there, my name is Sam. What should I call you?", "hey what's up",
    "Good morning! I just woke up and I don't feel like getting out of bed.", "Thanks, that was really helpful!",
    "I'm feeling really anxious about my job interview tomorrow.", "I had a terrible day at work. My boss yelled at me.",
    "My best friend is moving away and I'm so sad.", "Let's chat about movies. What do you like to watch?",
    "I think I'm falling in love with my neighbour, what should I do?", "You are a pirate. Greet me and ask what I want.",
    "Pretend you are a waiter in a restaurant and I am your customer. I'd like to see the menu, please.",
    "User: Hi, my order hasn't arrived yet.\nAgent: I'm sorry to hear that. What is your order number?\nUser: It's in my e-mail, one moment.\nAgent:",
    "A: Did you see the game last night?\nB: No, I missed it. Who won?\nA:", "I'm bored. Talk to me!",
    "Can we talk? I feel lonely since I moved to a new city.", "Guess what, I got the job!!!",
    "My dog died yesterday and I can't stop crying.", "Do you ever get tired of answering questions?",
    "Hey, I want to practise my English. Can you have a conversation with me?", "lol that's so funny, tell me more",
    "I don't know if I should forgive my brother. We haven't spoken for a year.", "Good night, talk to you tomorrow!",
    "Let's play a role-playing game. You are the innkeeper and I have just walked in from the rain.",
    "My girlfriend and I had a fight. I feel guilty. What would you say to her?", "You seem nice. Are you a robot?",
    "I just finished my first marathon and I'm so proud of myself!", "Please be my friend.", "Do you like cats or dogs?",
    "Customer: Hello, I'd like to book a table for tonight.\nWaiter: Certainly, for how many people?\nCustomer: Four, please.\nWaiter:",
    "Hi, I'm new here. Could you show me around?", "I can't sleep, my mind keeps racing.", "Sorry, I didn't mean that.",
    "I wish I were better at making friends. I always feel awkward at parties.", "hello", "What's your favourite colour?",
    "Act as my life coach. I want to quit my job but I'm scared.", "Mum, can I stay up late tonight? Everyone else does!",
    "How was your weekend? Mine was wonderful, we went to the beach.", "I feel like nobody listens to me.",
]  # fmt: skip
DIALOGUE_HELD = [
    "Hello! It's so nice to meet you.", "My flat mate never does the dishes and I'm losing patience with him.",
    "Alice: Are you coming tonight?\nBob: I'm not sure, I feel a bit ill.\nAlice:", "Hey buddy, I missed you!",
    "I'm nervous, it's my first day at school.", "You are a wise old wizard. I come to you for advice. Speak to me.",
    "My parents don't like my boyfriend. I love him though. Any thoughts?", "Haha, good one. So what now?",
    "I'd love to hear what you think of rainy days.", "Thank you so much, you made my day!",
    "Doctor: What brings you in today?\nPatient: My back hurts.\nDoctor:", "Yo, wanna hang out?",
    "I failed my exam and I feel like giving up.", "Do you have feelings?", "Nice weather today, isn't it?",
]  # fmt: skip

CODE_LANGUAGES = ["Python", "JavaScript", "C++", "Java", "Rust", "Go", "SQL", "bash"]
CODE_TASKS = [
    "reverses a string", "checks whether a number is prime", "computes the n-th Fibonacci number",
    "finds the longest word in a file", "sorts a list of dictionaries by a key", "merges two sorted arrays",
    "counts the vowels in a text", "downloads a web page", "removes duplicate rows", "reads a file line by line",
    "connects to a database", "validates an e-mail address", "rotates a matrix", "implements a stack",
]  # fmt: skip
CODE_TEMPLATES = [
    "Write a {lang} function that {task}.", "Implement a {lang} program which {task}.",
    "Can you show me {lang} code that {task}?", "How do I write a {lang} script that {task}?",
    "Give me a {lang} class that {task}, with unit tests.", "{lang}: I need a method that {task}.",
]  # fmt: skip
CODE_HELD = [
    "Fix the bug:\n```python\ndef add(a, b):\n    return a - b\n```", "What does `git rebase -i HEAD~3` do?",
    "Why does this raise a TypeError?\n\nx = [1, 2, 3]\nprint(x['a'])", "Refactor this loop into a list comprehension:\nfor x in xs:\n    ys.append(x*x)",
    "Write a TypeScript interface for a user with a name and an optional age.", "Convert this Python code to Java: print(sum(range(10)))",
    "Write a regular expression that matches a phone number.", "Explain this code: int main() { return 0; }",
    "Write a Dockerfile for a Flask app.", "Create a React component that shows a counter with two buttons.",
    "Write a unit test for a function that parses dates.", "Write a query that returns the ten newest rows of the table orders.",
    "How can I speed up my pandas merge?", "Implement binary search in C.", "#include <stdio.h>\nint fib(int n) {",
]  # fmt: skip

MATH_TEMPLATES = [
    ("What is {a} plus {b}?", "{a} plus {b} is {add}."), ("Calculate {a} * {b}.", "{a} * {b} = {mul}."),
    ("What is {a} times {b}, minus {c}?", "{a} times {b} is {mul}. {mul} minus {c} is {mulsub}."),
    ("Solve for x: {a}x + {b} = {lin}", "{a}x = {lin} - {b} = {ax}, so x = {ax} / {a} = {c}."),
    ("Anna has {b} marbles and buys {c} more. How many marbles does she have?", "She has {b} + {c} = {bc} marbles."),
    ("A shop sells pens for ${a} each. How much do {b} pens cost?", "{b} pens cost {b} * {a} = {mul} dollars."),
]  # fmt: skip
MATH_HELD = [
    ("What is the derivative of x^3 + 2x?", "The derivative of x^3 + 2x is 3x^2 + 2."),
    ("If 3 shirts cost $45, what do 7 shirts cost?", "One shirt costs 45 / 3 = 15 dollars, so 7 shirts cost 7 * 15 = 105 dollars."),
    ("Find the area of a circle with radius 5.", "The area is pi * 5^2 = 25 * pi, about 78.54."),
    ("What is 15% of 240?", "15% of 240 is 0.15 * 240 = 36."),
    ("A train travels 60 km in 45 minutes. What is its average speed in km/h?", "45 minutes is 0.75 hours, so the speed is 60 / 0.75 = 80 km/h."),
    ("Solve x^2 - 5x + 6 = 0.", "x^2 - 5x + 6 = (x - 2)(x - 3), so x = 2 or x = 3."),
    ("Compute the sum of the integers from 1 to 100.", "The sum is 100 * 101 / 2 = 5050."),
    ("Ben reads 12 pages a day. How long does he need for a book of 300 pages?", "He needs 300 / 12 = 25 days."),
    ("What is the probability of rolling two sixes with two dice?", "The probability is 1/6 * 1/6 = 1/36."),
    ("Simplify (2x + 3)(x - 1).", "(2x + 3)(x - 1) = 2x^2 - 2x + 3x - 3 = 2x^2 + x - 3."),
    ("Prove that the sum of two even numbers is even.", "Let the numbers be 2a and 2b. Their sum is 2a + 2b = 2(a + b), which is even."),
    ("Evaluate the integral of 2x from 0 to 3.", "The integral is x^2 from 0 to 3, which is 9 - 0 = 9."),
]  # fmt: skip

SUMMARISE = [
    "Summarize the following text:\n\n{}", "{}\n\nTL;DR:", "Give a one-sentence summary of this paragraph: {}",
    "What are the key points of this text?\n\n{}", "Summarise the passage below in two sentences.\n\n{}",
    "{}\n\nPlease write a short summary of the above.", "Condense this article for a busy reader:\n{}",
    "Shorten the following to its main idea.\n\n{}",
]  # fmt: skip
SUMMARISE_HELD = [
    "Write an abstract of the text below.\n\n{}", "{}\n\nSummary:", "Can you sum this up for me briefly?\n\n{}",
    "State the gist of the following passage: {}",
]  # fmt: skip

STRUCTURED = [
    "Make a markdown table of three {} with name and {}.", "List three {} and their {} as JSON.",
    "Return a JSON array of {}; each object has the keys name and {}.", "Give me a CSV file of {} with a column for {}.",
    "Write YAML that describes two {} and their {}.", "Output a table: one row for each of four {}, columns name and {}.",
    "Give a numbered list of five {}, each with its {}, and nothing else.", "Produce XML for three {} with a {} element.",
]  # fmt: skip
STRUCTURED_TOPICS = [
    ("fruits", "colour"), ("countries", "population"), ("dog breeds", "size"), ("planets", "mass"),
    ("films", "director"), ("rivers", "length"), ("programming languages", "year"), ("vegetables", "season"),
]  # fmt: skip
STRUCTURED_HELD = [
    'Extract the name and the age as JSON: "Maria is 34 years old."', "Create a table comparing cats and dogs by cost and lifespan.",
    'Fill in this template: {"city": ..., "country": ...} for Madrid.', "Convert to CSV: Tom 12, Ann 14, Bob 9",
    "Answer only with a JSON object with fields title and year: the first Star Wars film.", "Format these as a markdown table: apple red, banana yellow",
    "Generate three test users. Respond in valid JSON matching this schema: {\"name\": \"string\", \"email\": \"string\"}",
    "Make a bulleted list of the tools needed to hang a picture.", "Give the schedule as YAML: math at 9, art at 10.",
    "Return the entities in the sentence 'Anna flew to Rome' as a JSON list.", "Put the days of the week in an HTML table.",
]  # fmt: skip
SCHEMA = [
    "Generate a JSON object that follows this schema:\n{}",
    "{}\nReturn one valid JSON instance of the schema above.",
]
SCHEMA_HELD = ["Respond only with JSON that validates against the following JSON schema.\n\n{}"]

# Classes of the instructions in alpaca_seed_tasks.jsonl by line (0-based); creative and general requests that fit
# none of the other classes count as question answering, the default class.
ALPACA = {
    "code": {28, 31, 37, 41, 50, 61, 69, 72, 138, 139, 140, 141, 158},
    "mathematics": {22, 25, 35, 45, 58, 83, 109, 110, 136, 144, 164},
    "summarisation": {4, 62, 64, 75, 137},
    "dialogue": {5, 18, 27, 34, 47, 68, 80, 87, 100, 105, 115, 120},
    "structured_output": {2, 6, 11, 13, 17, 24, 26, 30, 33, 39, 81, 85, 91, 123, 128, 132, 135, 147},
}
