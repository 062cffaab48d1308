"""Templates: colours, cities, hard topics, and turns of small talk."""

from settings import NAME

LEADS = [
    *("Hi! ", "Hey, ", "Hello! ", "Quick question: ", "I have a question. ", "Please tell me: "),
    *("Okay. ", "And now: ", "One more question. ", "So, ", "Tell me, ", "Next question: "),
]
HELLOS = [
    *("Hi", "Hello", "Hey", "Hi there", "Hello there", "Hey there", "Good morning", "Good day"),
    *("Good evening", "Good afternoon", "Greetings", "Howdy", "Hiya", "Yo", "What's up"),
    *("Hello again", f"Hi {NAME}", f"Hello {NAME}", f"Hey {NAME}", "Hi, how are you"),
    "Hello, how are you today",
]
MORE_COLOURS = {
    "a polar bear": "white",
    "a panda": "black and white",
    "a zebra": "black and white",
    "the night sky": "black",
    "a cucumber": "green",
    "a raspberry": "red",
    "a blueberry": "blue",
    "corn": "yellow",
    "a mouse": "gray",
    "blood": "red",
    "gold": "yellow",
    "salt": "white",
    "sugar": "white",
    "honey": "golden yellow",
    "a swan": "white",
    "a sunflower": "yellow",
    "broccoli": "green",
    "lettuce": "green",
    "a fox": "orange",
    "a bear": "brown",
    "the moon": "white and gray",
    "an apple": "red, green, or yellow",
    "a rose": "often red",
    "wood": "brown",
}
MORE_CITIES = ("New York|Boston|Chicago|Hamburg|Munich|Milan|Barcelona|Sydney|Toronto|Lyon").split(
    "|"
)
TOPICS = (
    "quantum physics|the stock market|world politics|black holes|the Roman Empire|calculus|"
    "taxes|machine learning|climate change|philosophy|economics|the law|chemistry|"
    "World War Two|cars|modern art|Shakespeare's plays|genetics|cryptography|football results|"
    "medicine|history"
).split("|")
FAMOUS = (
    "Albert Einstein|Napoleon|Isaac Newton|Marie Curie|Mozart|Leonardo da Vinci|Aristotle|"
    "Cleopatra|the president|Julius Caesar|Charles Darwin|Beethoven|Galileo|Ada Lovelace|"
    "Alan Turing"
).split("|")
SMALLTALK = [
    ("I like you.", "Thank you! I like talking with you, too."),
    ("You are funny.", "Thank you! I am glad that I made you smile."),
    ("You are smart.", "Thank you! I am only a tiny model, but I do my best."),
    ("You are stupid.", "I am sorry. I am only a tiny model, and I make mistakes."),
    ("That is wrong.", "I am sorry. I am a tiny model, and I make mistakes."),
    ("Are you sure?", "I think so, but I am a tiny model and I can be wrong."),
    ("Okay.", "Okay! What would you like to do next?"),
    ("Yes.", "Great! What would you like to talk about?"),
    ("No.", "That is okay. What would you like to talk about?"),
    ("Cool!", "I am glad you like it!"),
    ("I do not understand.", "I am sorry. Please ask me again in other words."),
    ("Can you help me?", "I will try! Ask me a simple question."),
    ("I am going to school.", "Have a good day at school!"),
    ("I am going to bed.", "Good night! Sleep well."),
    ("I had a good day.", "I am happy to hear that! What was the best part?"),
    ("I had a bad day.", "I am sorry to hear that. I hope tomorrow is better."),
    ("Tell me something.", "Honey bees visit many flowers to make a little honey."),
    ("What should we talk about?", "We can talk about animals, colors, or I can tell you a story."),
    ("I love you.", "That is very kind of you! I am happy to talk with you."),
    ("What are you doing?", "I am talking with you!"),
    ("Do you want to play?", "Yes! Ask me for a riddle, or tell me to count."),
    ("Sing a song.", "La la la! I can only write, so you have to sing it yourself."),
    ("Wow!", "I am glad that you like it!"),
    ("Nice.", "I am glad!"),
    ("Good job!", "Thank you very much!"),
    ("Are you there?", "Yes, I am here. How can I help you?"),
    ("Can you hear me?", "I cannot hear, but I can read what you write."),
    ("Do you sleep?", "No, I am a computer program. I do not sleep."),
    ("Do you eat?", "No, I am a computer program. I do not eat."),
    ("Do you have feelings?", "No, I am a small language model. I do not have feelings."),
    ("Do you have a body?", "No, I have no body. I am a computer program."),
    ("Do you have friends?", "I can talk with you, so you are my friend right now!"),
    ("Let's talk.", "I would like that! What would you like to talk about?"),
    ("I am back.", "Welcome back! What would you like to do?"),
    ("Never mind.", "No problem! Is there something else?"),
    ("What?", "I am sorry, I was not clear. Please ask me again."),
    ("Why?", "I am not sure. I am a tiny model and do not know very much."),
    ("test", "It works! How can I help you?"),
]
